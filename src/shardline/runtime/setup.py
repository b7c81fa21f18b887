"""What follows from a resolved configuration: the same in the engine and in every worker, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from shardline.config.engine import EngineConfig, ParallelConfig
from shardline.config.topology import RankGrid
from shardline.models.kv_capacity import blocks_per_request
from shardline.models.lookup import decoder_spec
from shardline.models.partition import KVGroup, Span, kv_groups
from shardline.models.sharding import Numerics
from shardline.models.sizes import KVDType, kv_block_bytes, largest_weight_bytes, stage_spans, weight_bytes
from shardline.models.spec import MLA, DecoderSpec, DType, MoE
from shardline.models.weight_formats import scheme_of
from shardline.runtime.backends.host.reserve import weight_reserve
from shardline.runtime.loader.hub import ModelFiles, resolve_model
from shardline.runtime.parallel.segment import SegmentLayout

_CACHED_REQUESTS = 64
"""Requests of full length that the prefix cache may keep, however few may run at once."""

NUMERICS_VERSION = 5
"""Changes whenever the same request may get other bits than before; part of the fingerprint."""


@dataclass(frozen=True)
class ReplicaSetup:
    """A resolved configuration and what follows from it; made again by every process from the same EngineConfig."""

    config: EngineConfig
    """With model a folder, dtype, max_model_len, backend, threads and KV bytes decided."""
    files: ModelFiles
    spec: DecoderSpec
    grid: RankGrid
    stages: tuple[Span, ...]
    """Layers of each pipeline stage."""
    groups: tuple[KVGroup, ...]
    num_blocks: int
    """Of the KV pool, on every rank; block 0 is never used. 0: the ranks measure what fits once they have loaded."""

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens."""
        assert isinstance(self.config.model.max_model_len, int)
        return self.config.model.max_model_len

    @property
    def max_blocks(self) -> int:
        """Of a sequence's block table."""
        return -(-self.max_model_len // self.config.cache.block_size) + 1

    @property
    def dtype(self) -> DType:
        """Type of weights and activations."""
        return cast(DType, self.config.model.dtype)

    @property
    def kv_dtype(self) -> KVDType:
        """Type of keys and values in the cache."""
        return kv_dtype(self.config)

    @property
    def numerics(self) -> Numerics:
        """Whether floating-point sums may cross ranks."""
        return cast(Numerics, self.config.parallel.numerics)

    @property
    def expert_parallel(self) -> bool:
        """Whether each expert is whole, on one rank of a tensor-parallel group."""
        return self.config.parallel.enable_expert_parallel

    @property
    def quantization(self) -> str | None:
        """Name of the scheme in which linear weights are held; None: in `dtype`."""
        name = self.config.model.quantization
        return None if name == "none" else name

    @property
    def weight_format(self) -> tuple[str, int]:
        """Name of the format of linear weights, and the columns that share a scale (0: the format's own)."""
        scheme, _, size = (self.quantization or "plain").partition("_")
        return scheme, int(size) if size.isdigit() else 0

    @property
    def keeps_packed(self) -> bool:
        """Whether linear weights stay as the checkpoint has packed them."""
        return self.quantization is not None and scheme_of(self.quantization) == "w4a16"

    @property
    def num_experts(self) -> int:
        """Experts of the layer that has most; 0: the model has none."""
        blocks = [layer.feed_forward for layer in self.spec.layers]
        return max((block.routing.num_experts for block in blocks if isinstance(block, MoE)), default=0)

    @property
    def segment_layout(self) -> SegmentLayout:
        """Of the memory that all ranks map."""
        num_experts = self.num_experts
        return SegmentLayout(self.grid, len(self.spec.layers) if num_experts else 0, num_experts, self._shared_kv_bytes)

    @property
    def _shared_kv_bytes(self) -> tuple[int, ...]:
        """Of each stage's KV pool, where its ranks share one: all need all of the latents, and are on one host."""
        if (
            self.grid.tensor == 1
            or not latents_shared(self.config)
            or not all(isinstance(layer.attention, MLA) for layer in self.spec.layers)
        ):
            return ()
        per_stage = [0] * self.grid.pipeline
        for place in map(self.grid.place, range(self.grid.replica_size)):
            per_stage[place.pp_rank] += self.num_blocks * kv_block_bytes(
                self.spec, place, self.stages, self.dtype, self.config.cache.block_size
            )
        return tuple(per_stage)

    @property
    def max_in_flight(self) -> int:
        """Plans under way at once: one per stage; with one stage, the next is planned while one runs."""
        return max(2, self.grid.pipeline)

    @property
    def collectives(self) -> str:
        """How ranks exchange tensors: "shm", "gloo" or "nccl"."""
        parallel = self.config.parallel
        if parallel.collectives == "auto":
            return "nccl" if parallel.device == "cuda" else "shm"
        return parallel.collectives

    @property
    def tries_symmetric_memory(self) -> bool:
        """Whether small gathers between GPUs may go over symmetric memory: unless NCCL was asked for by name."""
        return self.config.parallel.collectives == "auto" and self.config.parallel.device == "cuda"

    def weight_bytes(self, rank: int) -> int:
        """Bytes of the weights that a rank holds, without padding."""
        place = self.grid.place(rank)
        return weight_bytes(
            self.spec, place, self.stages, self.dtype, self.numerics, self.quantization, self.expert_parallel
        )

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len tokens that fit the KV pool at once."""
        cache, scheduler = self.config.cache, self.config.scheduler
        per_request = blocks_per_request(
            self.groups, self.max_model_len, cache.block_size, scheduler.max_num_batched_tokens
        )
        return (self.num_blocks - 1) / per_request


def reserve_weights(setup: ReplicaSetup, rank: int) -> None:
    """Begin to take the memory of a rank's weights, if they lie in the host's; before torch is imported."""
    if setup.config.parallel.device == "cuda":
        return
    total = setup.weight_bytes(rank)
    # The mapped file of a tensor counts as this process's memory while it is packed: so much must not be taken before.
    largest = largest_weight_bytes(
        setup.spec, setup.grid.place(rank), setup.stages, setup.dtype, setup.numerics, setup.expert_parallel
    )
    weight_reserve.fill_memory(total, max(0, total - largest))


def prepare(config: EngineConfig) -> ReplicaSetup:
    """What follows from a resolved configuration; reads nothing but the model's configuration files."""
    files = resolve_model(config.model.model, None, weights=config.model.load_format != "dummy")
    assert isinstance(config.model.max_model_len, int)
    spec = decoder_spec(files.config, config.model.max_model_len)
    grid = replica_grid(config.parallel)
    stages = stage_spans(spec, grid.pipeline, config.parallel.pipeline_stages)
    length = config.model.max_model_len
    return ReplicaSetup(
        config=config,
        files=files,
        spec=spec,
        grid=grid,
        stages=stages,
        groups=kv_groups(spec),
        num_blocks=0 if measures_memory(config) else pool_blocks(config, spec, grid, stages, length),
    )


def measures_memory(config: EngineConfig) -> bool:
    """Whether the ranks of a resolved configuration find out what is left for the KV cache."""
    return config.cache.kv_cache_memory is None and config.cache.num_gpu_blocks_override is None


def kv_dtype(config: EngineConfig) -> KVDType:
    """What the KV cache of a resolved configuration holds."""
    asked = config.cache.kv_cache_dtype
    if asked == "auto":
        return cast(DType, config.model.dtype)
    return "int8" if asked == "int8" else "float8_e4m3fn"


def latents_shared(config: EngineConfig) -> bool:
    """Whether the ranks of a tensor-parallel group have one pool of latents: in host memory, but not on GPUs."""
    return config.parallel.device != "cuda"


def replica_grid(parallel: ParallelConfig) -> RankGrid:
    """The ranks of one engine."""
    return RankGrid(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, data=parallel.lockstep)


def pool_blocks(
    config: EngineConfig,
    spec: DecoderSpec,
    grid: RankGrid,
    stages: tuple[Span, ...],
    max_len: int | None,
    rooms: Sequence[int] | None = None,
) -> int:
    """Blocks of the pool, the null block included: what the memory of the fullest rank holds, and no more than
    max_num_seqs requests of full length, with prefix caching at least _CACHED_REQUESTS, can use.

    `rooms`: bytes for the KV cache of each rank; default: kv_cache_memory on all.
    """
    cache, scheduler = config.cache, config.scheduler
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override + 1
    if rooms is None:
        assert isinstance(cache.kv_cache_memory, int)
        rooms = [cache.kv_cache_memory] * grid.world_size
    dtype = kv_dtype(config)
    shared = latents_shared(config)
    fitting = min(
        room // kv_block_bytes(spec, grid.place(rank), stages, dtype, cache.block_size, latents_shared=shared)
        for rank, room in enumerate(rooms)
    )
    length = spec.max_position_embeddings if max_len is None else max_len
    most_requests = max(scheduler.max_num_seqs, _CACHED_REQUESTS if cache.enable_prefix_caching else 0)
    useful = most_requests * blocks_per_request(
        kv_groups(spec), length, cache.block_size, scheduler.max_num_batched_tokens
    )
    return int(min(fitting, useful + 1))
