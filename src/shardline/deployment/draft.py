"""A second model or a head, which drafts: on which ranks it runs, what it takes there, and what is refused."""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace as replace_struct

from shardline.config.engine import EngineConfig, SchedulerConfig
from shardline.config.parallel import ParallelConfig
from shardline.config.topology import RankGrid
from shardline.deployment.deployment import Deployment, DraftPlan, FixedPool, ModelSource, RankWeights
from shardline.deployment.layout import Layout
from shardline.deployment.machine import Machine
from shardline.models.kv_groups import kv_groups
from shardline.models.partition import Span, split_dim
from shardline.models.parts import DTYPE_BYTES, DType, KVDType
from shardline.models.sharding import check_tensor_parallel
from shardline.models.sizes import kv_bytes_per_token
from shardline.models.spec import DecoderSpec
from shardline.weights.base import FormatChoice


def config_of_draft(config: EngineConfig) -> EngineConfig:
    """The configuration as the draft model has it: its own weight format, unless its weights are the model's, and
    experts split over tensor ranks, since it meets no other replica."""
    asked = config.scheduler.speculation.draft
    assert asked is not None
    quantization = config.model.quantization if asked.method == "mtp" else asked.quantization
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, quantization=quantization),
        parallel=config.parallel.divided({}, whole_experts=False),
    )


def config_of_draft_ranks(config: EngineConfig) -> EngineConfig:
    """The configuration of the draft model on ranks of its own, which are an engine of their own.

    Raises:
        ValueError: there cannot be any.
    """
    asked, model, parallel = config.scheduler.speculation.draft, config.draft_model, config.parallel
    assert asked is not None
    assert model is not None
    if config.cluster.has_nodes or config.places_with_ray:
        raise ValueError(
            "draft_ranks of speculative_config work on one host only so far: leave them out, so that the draft model "
            "runs on the ranks of the model"
        )
    return EngineConfig(
        model=dataclasses.replace(model, max_model_len="auto"),
        parallel=ParallelConfig(tensor_parallel_size=asked.ranks, device=parallel.device, kernels=parallel.kernels),
        scheduler=SchedulerConfig(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        ),
    )


def share_machine(machine: Machine, config: EngineConfig) -> Machine:
    """What of a machine the ranks of one engine's draft model may use: as many cores for each as for other ranks."""
    asked, parallel = config.scheduler.speculation.draft, config.parallel
    assert asked is not None
    of_model = parallel.sharing * parallel.pipeline_parallel_size * parallel.lockstep
    cores = machine.hosts[0].cores * asked.ranks // (parallel.num_engines * (of_model + asked.ranks))
    return _with_host(machine, max(1, cores), machine.hosts[0].free_memory // parallel.num_engines)


def machine_beside(machine: Machine, drafting: Deployment, num_engines: int) -> Machine:
    """What of a machine is left beside the draft models `drafting` of so many engines."""
    pool = drafting.cache.pool
    assert isinstance(pool, FixedPool), "GPUs have no drafts"
    taken = sum(rank.num_bytes for rank in drafting.weights) + pool.num_blocks * sum(drafting.cache.block_bytes)
    threads = sum(place.threads for place in drafting.placements[0])
    host = machine.hosts[0]
    return _with_host(
        machine, max(1, host.cores - num_engines * threads), max(0, host.free_memory - num_engines * taken)
    )


def _with_host(machine: Machine, cores: int, memory: int) -> Machine:
    """A machine of one host with so many cores, and so many free bytes."""
    host = machine.hosts[0]
    devices = tuple(
        replace_struct(device, cores=cores, memory_free=memory) if device.kind == "cpu" else device
        for device in host.devices
    )
    return replace_struct(machine, hosts=(replace_struct(host, cores=cores, free_memory=memory, devices=devices),))


def grid_of_draft(config: EngineConfig, grid: RankGrid) -> RankGrid:
    """The ranks that share each layer of the draft model: all of the last stage of `grid`, or one. Ranks that share the
    keys of a request divide its heads, too, since it has few keys."""
    asked = config.scheduler.speculation.draft
    assert asked is not None
    return RankGrid(1 if asked.tensor_parallel_size == 1 else grid.sharing, 1)


def check_draft(config: EngineConfig, layout: Layout, spec: DecoderSpec, drafting: DecoderSpec) -> None:
    """Refuse a draft model of the spec `drafting` that cannot run on the ranks of the model.

    Raises:
        ValueError: the message says what would work.
    """
    asked, grid = config.scheduler.speculation.draft, layout.grid
    assert asked is not None
    name = f"the draft model {asked.model!r}" if asked.model else 'the head of the method "mtp"'
    if asked.tensor_parallel_size not in (None, 1, grid.tensor):
        raise ValueError(
            f"draft_tensor_parallel_size {asked.tensor_parallel_size} of speculative_config: 1 or the "
            f"tensor_parallel_size {grid.tensor} of the model works"
        )
    check_generates(name, drafting)
    if config.parallel.enable_expert_parallel and any(layer.feed_forward.routing for layer in drafting.layers):
        raise ValueError(
            f"{name} has experts, which enable_expert_parallel would spread over ranks; use a dense draft model, or "
            "leave enable_expert_parallel out"
        )
    if drafting.head_input is not None and drafting.hidden_size != spec.hidden_size:
        raise ValueError(
            f"{name} reads hidden states of {drafting.hidden_size} elements, and those of the model "
            f"have {spec.hidden_size}; use a head that was trained for this model"
        )
    if all(group.window is not None for group in kv_groups(spec)):
        raise ValueError(
            "a draft model uses the block table of layers without a window, and the model has none; use the method "
            '"ngram" or "suffix" of speculative_config'
        )
    if grid_of_draft(config, grid).tensor > 1:
        try:
            check_tensor_parallel(drafting, grid.tensor, grid.context)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; or draft_tensor_parallel_size 1 in speculative_config") from None


def check_generates(name: str, drafting: DecoderSpec) -> None:
    """Refuse a draft model that classifies, or that cannot go back behind a wrong guess; `name` is it in words.

    Raises:
        ValueError: it does, or cannot.
    """
    if drafting.keeps_states:
        raise ValueError(
            f"{name} keeps a state for each request, and not that before a wrong guess; use one that has attention in "
            "all layers"
        )
    if drafting.num_labels is not None:
        raise ValueError(
            f"{name} classifies (ForSequenceClassification) and cannot guess tokens; use one that generates"
        )


def check_draft_length(config: EngineConfig, drafting: DecoderSpec, length: int) -> None:
    """Refuse requests that are longer than the draft model can be.

    Raises:
        ValueError: its positions are fewer than `length` tokens.
    """
    asked, most = config.scheduler.speculation.draft, drafting.max_position_embeddings
    assert asked is not None
    if length > most:
        raise ValueError(
            f"max_model_len is {length}, and the draft model {asked.model!r} has {most} positions; use "
            f"--max-model-len {most}, or another draft model"
        )


def plan_draft(
    config: EngineConfig,
    layout: Layout,
    model: ModelSource,
    spec: DecoderSpec,
    drafting: DecoderSpec,
    held: FormatChoice,
    weights: tuple[RankWeights, ...],
    dtype: DType,
    kv_dtype: KVDType,
) -> DraftPlan:
    """The draft model `model`, of the spec `drafting`, beside a model of `spec`. `weights`: of each of the ranks of
    `grid_of_draft`.

    A model that is not split runs on the rank that reports tokens only: others would read the same weights from the
    same memory to find the same guesses. A head needs all ranks of its stage, which share the model's embedding and
    lm_head. It has rows of hidden states beside its keys, of which ranks share the columns. If its stage is not the
    first one, it needs an embedding there, unless the lm_head is one.
    """
    limits, block_size, grid = config.scheduler, config.cache.block_size, layout.grid
    assert block_size is not None, "it is chosen before"
    whole = (Span(0, len(drafting.layers)),)
    of_model = [grid.place(rank) for rank in range(grid.world_size)]
    apart = grid_of_draft(config, grid)
    places = [apart.place(place.share % apart.tensor) for place in of_model]
    has_it = [place.pp_rank == grid.pipeline - 1 for place in of_model]
    kept, embedding = [0] * grid.world_size, [0] * grid.world_size
    if drafting.head_input is not None:
        columns, rows = split_dim(spec.hidden_size, apart.tensor), split_dim(spec.vocab_size, grid.sharing)
        kept = [columns[place.share].size * DTYPE_BYTES[dtype] for place in places]
        if grid.pipeline > 1 and not spec.tied_embeddings:
            embedding = [rows[place.share].size * spec.hidden_size * DTYPE_BYTES[dtype] for place in of_model]
    elif apart.tensor == 1:
        has_it = [place.rank in grid.drivers for place in of_model]
    return DraftPlan(
        model=model,
        spec=drafting,
        weight_format=held,
        group=next(index for index, group in enumerate(kv_groups(spec)) if group.window is None),
        num_spare_blocks=limits.max_num_seqs * -(-limits.speculation.num_speculative_tokens // block_size),
        num_sharing=apart.tensor,
        weights=tuple(
            weights[place.rank] + RankWeights(more, 0) if has else RankWeights(0, 0)
            for place, has, more in zip(places, has_it, embedding, strict=True)
        ),
        block_bytes=tuple(
            has * block_size * (kv_bytes_per_token(drafting, place, whole, kv_dtype, latents_shared=False) + row)
            for place, has, row in zip(places, has_it, kept, strict=True)
        ),
    )
