"""What runs where: every decision, typed and frozen. Engines and workers receive it unchanged."""

from __future__ import annotations

from typing import Literal

import msgspec

from shardline.config.engine import LogprobsMode
from shardline.config.experts import NO_BALANCING, ExpertBalancing
from shardline.config.kv_events import KVEventsConfig
from shardline.config.speculation import NO_SPECULATION, Speculation
from shardline.config.topology import RankGrid
from shardline.deployment.machine import DeviceKind, Host, Machine
from shardline.models.kv_groups import KVGroup
from shardline.models.partition import Span
from shardline.models.parts import DType, KVDType
from shardline.models.sharding import Numerics
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import StoredRules
from shardline.watermark.keys import WatermarkKey
from shardline.weights.base import FormatChoice

ExecutorName = Literal["uni", "mp", "threads"]
CollectivesName = Literal["shm", "gloo", "nccl"]
KernelsName = Literal["own", "triton", "torch"]
"""own: on GPUs, Triton's where they are proved and else torch's; triton: all of them must be proved."""
"""Kernels written for a kind of device, or plain torch operations."""


class ModelSource(msgspec.Struct, frozen=True):
    """Which model is served, and where its weights come from."""

    name: str
    """What the user asked for."""
    folder: str
    """Its folder; of a model in GGUF, the file or its first part."""
    weight_files: tuple[str, ...]
    """The safetensors or GGUF files; empty if weights are random."""
    load_format: Literal["safetensors", "gguf", "dummy"]
    seed: int
    """Seed of random weights."""
    stored: StoredRules
    """How config.json says that weights are quantized. It is set for random weights too."""
    config_text: str
    """config.json with sorted keys. It is part of the fingerprint."""
    tokenizer_file: str = ""
    """The model's tokenizer.json, or the GGUF file with its tokenizer, for grammars; empty: it has none."""


class RankPlacement(msgspec.Struct, frozen=True):
    """Where one rank runs: an index into the machine's hosts, and one into the devices of that host."""

    host: int
    device: int
    threads: int
    """CPU threads."""


LAYER_SLOTS = 2
"""Layers whose weights are read in every step and that have memory at a time: the layer that computes, and the one that
is read."""


class RankWeights(msgspec.Struct, frozen=True):
    """The weights of one rank."""

    num_bytes: int
    """Bytes without padding."""
    touched_bytes: int
    """Bytes of host memory to touch before the weights are read; 0 on GPUs. While a tensor is packed, its mapped file
    counts as memory of the process too. So the rank's largest tensor is left out, or what is mapped of it at a
    time."""
    read_bytes: int = 0
    """Bytes that are read in every step, or of experts if tokens choose them; in the file they may be fewer. They are
    not part of `num_bytes`."""
    slot_bytes: int = 0
    """The most of them that a layer has. `num_bytes` includes memory for LAYER_SLOTS layers."""
    kept_expert_bytes: int = 0
    """Memory for experts that are read when tokens choose them. It is part of `num_bytes`."""
    expert_layer_bytes: int = 0
    """The most that the experts of a layer have, if they are read so."""
    host_bytes: int = 0
    """Bytes in host memory from which a device other than the CPU copies its weights."""

    @property
    def loaded_bytes(self) -> int:
        """Bytes of all weights, in memory or not."""
        return self.num_bytes + self.read_bytes - LAYER_SLOTS * self.slot_bytes

    def __add__(self, more: RankWeights) -> RankWeights:
        """The memory of both."""
        return RankWeights(
            self.num_bytes + more.num_bytes,
            self.touched_bytes + more.touched_bytes,
            self.read_bytes + more.read_bytes,
            max(self.slot_bytes, more.slot_bytes),
            self.kept_expert_bytes + more.kept_expert_bytes,
            max(self.expert_layer_bytes, more.expert_layer_bytes),
            self.host_bytes + more.host_bytes,
        )


class OffloadPlan(msgspec.Struct, frozen=True):
    """Weights that are read from files, or copied to a device from host memory."""

    folder: str = ""
    """Empty: none lie in files."""
    layers: tuple[int, ...] = ()
    """Those that every step reads."""
    expert_layers: tuple[int, ...] = ()
    """Those whose experts are read when tokens choose them and they are not in memory."""
    host_layers: tuple[int, ...] = ()
    """Those of `layers` that lie in host memory."""

    def of_stage(self, stage: Span) -> OffloadPlan:
        """The layers of a stage."""
        chosen = (self.layers, self.expert_layers, self.host_layers)
        return OffloadPlan(
            self.folder, *(tuple(layer for layer in layers if stage.start <= layer < stage.stop) for layers in chosen)
        )


NO_OFFLOAD = OffloadPlan()


class FixedPool(msgspec.Struct, frozen=True, tag=True):
    """A KV pool whose size was decided before anything was loaded."""

    num_blocks: int
    """Blocks on every rank, or on all that share the keys of a request. The first of each rank is never used."""


class MeasuredPool(msgspec.Struct, frozen=True, tag=True):
    """A KV pool that fills the GPU memory that is left after loading. The ranks measure it."""

    share: float
    """Share of each GPU's memory that may be used in total."""


class TierPlan(msgspec.Struct, frozen=True):
    """A second tier behind the KV pool of each replica."""

    num_slots: int
    """Blocks of which each rank has host memory for its part; 0: there is no tier, and evicted blocks are lost."""
    num_bytes: int
    """Host memory of a replica."""
    folder: str
    """Where ranks keep files, on each host; empty: they keep none."""
    folder_bytes: int
    """What the files on a host may take."""


NO_TIER = TierPlan(0, 0, "", 0)


class CachePlan(msgspec.Struct, frozen=True):
    """The paged KV cache."""

    dtype: KVDType
    groups: tuple[KVGroup, ...]
    block_size: int
    """Tokens per block."""
    max_blocks: int
    """Entries of a sequence's block table."""
    prefix_caching: bool
    latents_shared: bool
    """Whether the ranks of a tensor-parallel group have one pool of latents, in host memory."""
    block_bytes: tuple[int, ...]
    """Bytes of one block on each rank of an engine. If the pool is shared, this is the rank's part of a block."""
    useful_blocks: int
    """The most blocks that any set of requests can use, plus the null block."""
    pool: FixedPool | MeasuredPool
    events: KVEventsConfig = KVEventsConfig()
    """Where each replica publishes what its cache holds."""
    events_to_front: bool = False
    """Whether the front follows what each cache holds, to choose replicas by it."""
    tier: TierPlan = NO_TIER
    """Where evicted blocks go."""
    context: int = 1
    """Ranks that share the keys of a request: block b is block b // context of rank b % context."""


class AdapterPlan(msgspec.Struct, frozen=True):
    """The LoRA adapters that the ranks hold at once, and their memory."""

    num_slots: int = 0
    """0: requests name none."""
    max_rank: int = 0
    num_bytes: tuple[int, ...] = ()
    """Bytes on each rank of an engine, if every slot has an adapter of this rank that changes all that it can."""
    kinds: tuple[str, ...] = ()
    """The kinds (`kind_of`) of parameters that they may change."""
    experts: bool = False
    """Whether they may change experts, if these are among the kinds."""


NO_ADAPTERS = AdapterPlan()


class DraftPlan(msgspec.Struct, frozen=True):
    """A second model, or a head, whose guesses are drafts. It runs whole in the last stage, in the dtypes of the first
    one."""

    model: ModelSource
    spec: DecoderSpec
    weight_format: FormatChoice
    group: int
    """Which of the first model's KV groups has the block table that its layers use."""
    num_spare_blocks: int
    """Further blocks of its own, for guesses behind the blocks that a sequence has."""
    num_sharing: int
    """Ranks that share each of its layers: all of the stage, or 1."""
    weights: tuple[RankWeights, ...]
    """Of each rank of an engine, none if it does not run there; `Deployment.weights` counts them, too."""
    block_bytes: tuple[int, ...]
    """Bytes of its part of a block on each rank of an engine; `CachePlan.block_bytes` does not count it."""

    @property
    def spare_bytes(self) -> tuple[int, ...]:
        """Of the spare blocks of each rank of an engine."""
        return tuple(self.num_spare_blocks * num_bytes for num_bytes in self.block_bytes)


class StepLimits(msgspec.Struct, frozen=True):
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    speculation: Speculation = NO_SPECULATION
    """How tokens are drafted."""
    max_prefill_tokens: int = 0
    """The most tokens of one prompt in a step; 0: as many as there are."""
    least_prefill_share: int = 128
    """A pipeline does not cut prompts finer than this to keep its stages busy, since tinier steps are not shorter."""
    keeps_states: bool = False
    """Whether ranks have a state for each of `max_num_seqs` sequences, also for those that leave with steps in
    flight."""

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted."""
        return self.speculation.num_speculative_tokens > 0

    @property
    def max_samples(self) -> int:
        """The most tokens that a step samples: those of a full batch, or of one sequence with a full draft."""
        return max(self.max_num_seqs, 1 + self.speculation.num_speculative_tokens)


class Deployment(msgspec.Struct, frozen=True):
    """A model on a machine. Every choice is made: nothing in it must be parsed or derived again."""

    model: ModelSource
    spec: DecoderSpec
    dtype: DType
    """Type of weights and activations."""
    weight_format: FormatChoice
    """Format of linear weights."""
    numerics: Numerics
    """Whether floating-point sums may cross ranks."""
    check_finite: bool
    logprobs_mode: LogprobsMode
    embeds: bool
    """Whether requests get the final hidden state of their last token instead of sampled tokens."""

    machine: Machine
    device: DeviceKind
    """The kind of device on which all ranks compute."""
    kernels: KernelsName
    grid: RankGrid
    """The ranks of one engine."""
    placements: tuple[tuple[RankPlacement, ...], ...]
    """For each engine, the places of its ranks."""
    stages: tuple[Span, ...]
    """Layers of each pipeline stage."""
    expert_parallel: bool
    """Whether each expert is whole on one rank of its stage."""
    num_experts: int
    """The largest number of experts in a layer; 0: the model has no experts."""
    weights: tuple[RankWeights, ...]
    """The weights of each rank of an engine."""
    executor: ExecutorName
    collectives: CollectivesName
    """How ranks exchange tensors."""
    tries_symmetric_memory: bool
    """Whether small gathers between GPUs may go over symmetric memory."""
    step_timeout: float
    """Seconds."""
    connect_timeout: float
    """Seconds within which the ranks of a group must have connected."""
    max_in_flight: int
    """Steps in flight at once: one per stage, but at least two, so that the next step is planned while one runs."""

    max_model_len: int
    """Longest request in tokens, prompt and output."""
    limits: StepLimits
    cache: CachePlan
    adapters: AdapterPlan
    state_bytes: tuple[int, ...]
    """Bytes on each rank of an engine for the states of all requests that may run at once; empty: the model keeps
    none."""

    host_models: tuple[ModelSource, ...]
    """For each host, the model as its files lie there; empty: they lie at the same places on all hosts."""

    reasons: tuple[str, ...]
    """Each choice that was left open, what was chosen, and why."""
    warnings: tuple[str, ...]
    offload: OffloadPlan = NO_OFFLOAD
    """Which layers' weights are not kept in memory."""
    expert_balancing: ExpertBalancing = NO_BALANCING
    """How experts move between ranks."""
    watermark: tuple[WatermarkKey, ...] = ()
    """The one secret with which answers are marked; empty: they have no mark."""
    draft: DraftPlan | None = None
    """The model or head that drafts on these ranks; None: none does."""
    drafting: Deployment | None = None
    """The draft model on ranks of its own, an engine beside each engine; None: there are none."""
    role: str = ""
    """What its processes are called beside those of the model: "draft" for `drafting` of another one."""

    @property
    def file_bytes(self) -> float:
        """The most that a rank reads from a file in a step, or of experts if tokens choose them."""
        # Layers of bf16 are stored with short exponents.
        is_short = self.offload.layers and (self.dtype, self.weight_format.name) == ("bfloat16", "plain")
        most = max((rank.read_bytes - min(rank.read_bytes, rank.host_bytes) for rank in self.weights), default=0)
        return most * (0.75 if is_short else 1.0)

    @property
    def lora_memory(self) -> tuple[int, str]:
        """Bytes that the rank with the most keeps for adapters, and how many these are."""
        return max(self.adapters.num_bytes, default=0), f"{self.adapters.num_slots} of rank {self.adapters.max_rank}"

    @property
    def last_token_known(self) -> bool:
        """Whether a sequence is stepped only from a token that its scheduler knows."""
        return self.grid.pipeline > 1

    @property
    def of_draft(self) -> Deployment | None:
        """The deployment as if the draft model were the only one; None: there is none."""
        draft = self.draft
        if draft is None:
            return None
        return msgspec.structs.replace(
            self,
            model=draft.model,
            spec=draft.spec,
            weight_format=draft.weight_format,
            stages=(Span(0, len(draft.spec.layers)),) * len(self.stages),
            weights=draft.weights,
            expert_parallel=False,
            adapters=NO_ADAPTERS,
            offload=NO_OFFLOAD,
            expert_balancing=NO_BALANCING,
            host_models=(),
            draft=None,
        )

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The layers whose inputs a head reads; the number of layers stands for the output of the last one."""
        head = None if self.draft is None else self.draft.spec.head_input
        return () if head is None else head.sources or (len(self.spec.layers),)

    @property
    def keeps_packed(self) -> bool:
        """Whether linear weights stay packed as in the checkpoint."""
        return self.weight_format.open_format().reads_packed

    def ranks_on(self, engine: int, host: int) -> tuple[int, ...]:
        """The ranks of an engine that run on one of the machine's hosts, in order."""
        return tuple(rank for rank, place in enumerate(self.placements[engine]) if place.host == host)

    def gpus_of(self, engine: int, host: int = 0) -> str | None:
        """The value of CUDA_VISIBLE_DEVICES for an engine's processes on a host; None: they see the node's own GPUs.

        Ranks that share GPUs see all of them.
        """
        if self.device != "cuda" or self.collectives == "gloo":
            return None
        places = [place for place in self.placements[engine] if place.host == host]
        return ",".join(self.machine.hosts[host].devices[place.device].identifier for place in places)

    def local_rank(self, engine: int, rank: int) -> int:
        """The position of a rank among the ranks of its engine on the same host."""
        return self.ranks_on(engine, self.placements[engine][rank].host).index(rank)

    def remote_ranks(self, engine: int) -> list[int]:
        """The ranks of an engine that are not on its host. An engine runs on the host of its first rank."""
        places = self.placements[engine]
        return [rank for rank, place in enumerate(places) if place.host != places[0].host]

    def with_host(self, index: int, host: Host, model: ModelSource) -> Deployment:
        """The deployment after a host was replaced by another one, which runs the same ranks."""
        former = self.machine.hosts[index]
        host = msgspec.structs.replace(host, num_ranks=former.num_ranks, num_replicas=former.num_replicas)
        hosts = (*self.machine.hosts[:index], host, *self.machine.hosts[index + 1 :])
        models = self.host_models and (*self.host_models[:index], model, *self.host_models[index + 1 :])
        return msgspec.structs.replace(
            self, machine=msgspec.structs.replace(self.machine, hosts=hosts), host_models=models
        )

    def seen_from(self, host: int) -> Deployment:
        """The deployment with the model's files as they lie on a host."""
        return msgspec.structs.replace(self, model=self.host_models[host]) if self.host_models else self


class KernelFallback(msgspec.Struct, frozen=True):
    """A kernel of the GPU's own in whose place torch computes."""

    kernel: str
    """See `kernel_cases.KernelCase` and `gpu_support`."""
    why: str

    def __str__(self) -> str:
        """For people."""
        if self.kernel == "graphs":
            return f"layers run op by op, without {self.kernel}: {self.why}"
        return f"torch computes {self.kernel}: {self.why}"


class KVAllocation(msgspec.Struct, frozen=True):
    """The size of the KV pool. An engine decides it once for all of its ranks."""

    num_blocks: int
    """As in `FixedPool`."""
