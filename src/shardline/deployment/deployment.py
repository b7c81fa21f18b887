"""What runs where: everything that was decided, typed and frozen. It travels to every process as it is."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardline.config.topology import RankGrid
from shardline.deployment.machine import DeviceKind, Machine
from shardline.models.kv_groups import KVGroup
from shardline.models.packed_weights import PackedFormat
from shardline.models.partition import Span
from shardline.models.sharding import Numerics
from shardline.models.spec import DecoderSpec, DType, KVDType
from shardline.weights.base import FormatChoice

ExecutorName = Literal["uni", "mp", "threads"]
CollectivesName = Literal["shm", "gloo", "nccl"]


class ModelSource(msgspec.Struct, frozen=True):
    """Which model is served, and where its weights come from."""

    name: str
    """What the user asked for."""
    folder: str
    weight_files: tuple[str, ...]
    """The safetensors files; none where weights are random."""
    load_format: Literal["safetensors", "dummy"]
    seed: int
    """Of random weights."""
    packed: PackedFormat
    """How its linear weights are packed, as config.json says (also where random weights stand for them)."""
    config_text: str
    """config.json, its keys sorted: a part of the fingerprint."""


class RankPlacement(msgspec.Struct, frozen=True):
    """Where one rank runs: indices into the hosts of the machine, and into the devices of that host."""

    host: int
    device: int
    threads: int
    """Of the CPU."""


class RankWeights(msgspec.Struct, frozen=True):
    """The weights of one rank."""

    num_bytes: int
    """Without padding."""
    touched_bytes: int
    """Bytes of host memory to touch before the weights are read. The mapped file of a tensor counts as memory of the
    process while it is packed, so its largest tensor is left out. 0 on GPUs."""


class FixedPool(msgspec.Struct, frozen=True, tag=True):
    """A KV pool whose size was decided before anything was loaded."""

    num_blocks: int
    """On every rank; block 0 is never used."""


class MeasuredPool(msgspec.Struct, frozen=True, tag=True):
    """A KV pool that fills what the ranks measure as left on their GPUs once they have loaded."""

    share: float
    """Of each GPU's memory that may be used in all."""


class CachePlan(msgspec.Struct, frozen=True):
    """The paged KV cache."""

    dtype: KVDType
    groups: tuple[KVGroup, ...]
    block_size: int
    """Tokens."""
    max_blocks: int
    """Entries of a sequence's block table."""
    prefix_caching: bool
    latents_shared: bool
    """Whether the ranks of a tensor-parallel group have one pool of latents, in host memory."""
    block_bytes: tuple[int, ...]
    """Of one block, on each rank of an engine; of a shared pool, the rank's part."""
    useful_blocks: int
    """More blocks than this no set of requests can use, the null block included."""
    pool: FixedPool | MeasuredPool


class StepLimits(msgspec.Struct, frozen=True):
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Deployment(msgspec.Struct, frozen=True):
    """A model on a machine. Nothing in it is open, and nothing must be parsed or derived again."""

    model: ModelSource
    spec: DecoderSpec
    dtype: DType
    """Of weights and activations."""
    weight_format: FormatChoice
    """Of linear weights."""
    numerics: Numerics
    """Whether floating-point sums may cross ranks."""
    check_finite: bool

    machine: Machine
    device: DeviceKind
    """Where all ranks compute."""
    grid: RankGrid
    """The ranks of one engine."""
    placements: tuple[tuple[RankPlacement, ...], ...]
    """Of each engine, where its ranks run."""
    stages: tuple[Span, ...]
    """Layers of each pipeline stage."""
    expert_parallel: bool
    """Whether each expert is whole, on one rank of its stage."""
    num_experts: int
    """Experts of the layer that has most; 0: the model has none."""
    weights: tuple[RankWeights, ...]
    """Of each rank of an engine."""
    executor: ExecutorName
    collectives: CollectivesName
    """How ranks exchange tensors."""
    tries_symmetric_memory: bool
    """Whether small gathers between GPUs may go over symmetric memory."""
    step_timeout: float
    """Seconds."""
    max_in_flight: int
    """Steps under way at once: one for each stage; with one stage, the next is planned while one runs."""

    max_model_len: int
    """Longest request in tokens, prompt and output."""
    limits: StepLimits
    cache: CachePlan

    reasons: tuple[str, ...]
    """What was left open, what was chosen for it, and why."""
    warnings: tuple[str, ...]

    @property
    def keeps_packed(self) -> bool:
        """Whether linear weights stay as the checkpoint has packed them."""
        return self.weight_format.open_format().reads_packed

    def gpus_of(self, engine: int) -> str | None:
        """The GPUs that an engine's processes may see, as CUDA_VISIBLE_DEVICES; None: those of this process. (Ranks
        that share GPUs see all of them.)"""
        if self.device != "cuda" or self.collectives == "gloo":
            return None
        places = self.placements[engine]
        return ",".join(self.machine.hosts[place.host].devices[place.device].identifier for place in places)


class KVAllocation(msgspec.Struct, frozen=True):
    """The size of the KV pool, which an engine decides once for all of its ranks."""

    num_blocks: int
    """On every rank; block 0 is never used."""
