"""Decide what runs where. Every choice and every refusal is made here, before anything is loaded."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from msgspec.structs import replace as replace_struct

from shardline.checkpoints.description import ModelDescription
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.lookup import module_names
from shardline.config.engine import EngineConfig, LogprobsMode
from shardline.config.parallel import ParallelConfig
from shardline.config.topology import RankGrid, RankPlace
from shardline.deployment.adapters import plan_adapters
from shardline.deployment.cache import choose_block_size, plan_cache
from shardline.deployment.context_parallel import check_context_parallel, check_splits
from shardline.deployment.deployment import Deployment, DraftPlan, ModelSource, RankWeights, StepLimits
from shardline.deployment.draft import (
    check_draft,
    check_draft_length,
    check_generates,
    config_of_draft,
    config_of_draft_ranks,
    grid_of_draft,
    machine_beside,
    plan_draft,
    share_machine,
)
from shardline.deployment.formats import (
    check_numerics,
    choose_dtype,
    choose_kv_dtype,
    choose_weight_format,
    own_formats,
    stored_forms,
)
from shardline.deployment.generations import check_format
from shardline.deployment.gpu_support import check_gpu_support
from shardline.deployment.kv_budget import rank_room
from shardline.deployment.layout import Layout, choose_layout
from shardline.deployment.length import check_length
from shardline.deployment.machine import Device, DeviceKind, Machine
from shardline.deployment.reasons import explain_choices
from shardline.deployment.request_states import config_for_states, plan_states
from shardline.deployment.weight_offload import passage_bytes, plan_offload
from shardline.models.partition import Span
from shardline.models.parts import DType, KVDType
from shardline.models.sharding import Numerics, check_expert_parallel, check_tensor_parallel
from shardline.models.sizes import (
    OwnFormats,
    decode_elements,
    largest_weight_bytes,
    layer_bytes,
    stage_spans,
    state_step_bytes,
    step_bytes,
    weight_bytes,
)
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import StoredWeights
from shardline.weights.base import FormatChoice

_MAPPED_BYTES = 64 << 20
"""What a rank maps of a tensor at a time, see `kernels/page_cache.py`."""


def resolve(config: EngineConfig, model: ModelDescription, machine: Machine) -> Deployment:
    """Decide what runs where for `config` and `model` on `machine`.

    The function is pure: it opens, probes, loads and logs nothing.

    Raises:
        ValueError: the model, the layout or the memory does not allow it. The message says what would work.
    """
    parallel, asked_length = config.parallel, config.model.max_model_len
    drafting = _on_own_ranks(config, model, machine)
    if drafting is not None:
        machine = machine_beside(machine, drafting, parallel.num_engines)
    layout = choose_layout(parallel, machine)
    devices = tuple(device for index in layout.hosts for device in layout.devices_on(index, machine))
    if layout.device != "cpu":
        layout = _check_alike(devices, layout, parallel)
    dtype = choose_dtype(config.model.dtype, model.spec().dtype, model.stored)
    check_format(f"dtype {dtype}", dtype, devices, layout.kernels, "--dtype float32")
    spec = model.spec(asked_length if isinstance(asked_length, int) else None)
    if layout.device == "cuda" and layout.kernels != "torch":
        check_gpu_support(spec, only_triton=layout.kernels == "triton")
    config = config_for_states(config, spec)
    check_length(asked_length, spec)
    embeds = _embeds(config, spec)
    if model.checkpoint is not None:
        model.checkpoint.check(spec, model.stored)
    held = choose_weight_format(config, model.stored, devices, layout.kernels)
    kv_dtype = choose_kv_dtype(config.cache.kv_cache_dtype, dtype, spec, devices, layout.kernels)
    block_size = choose_block_size(config.cache.block_size, spec, dtype, kv_dtype, layout.device)
    check_context_parallel(config, layout, spec, block_size)
    sized = replace(config, cache=replace(config.cache, block_size=block_size))
    _check_splits(parallel, spec)
    _check_balancing(parallel, layout, _num_experts(spec))
    check_numerics(config, held, devices)
    draft = _plan_draft(sized, layout, model, spec, dtype, kv_dtype, devices)
    drafted = 0.0
    if draft is not None:
        passes = config.scheduler.speculation.num_speculative_tokens * layout.grid.sharing / draft.num_sharing
        drafted = passes * decode_elements(draft.spec)
    stages = stage_spans(spec, parallel.pipeline_parallel_size, parallel.pipeline_stages, drafted)
    own_weights = _rank_weights(config, layout, model, spec, stages, dtype, held)
    own_formats = _own_formats(model, spec, layout.device, held)

    def bytes_of(place: RankPlace, layer: int, only_experts: bool) -> int:
        whole, numerics = parallel.enable_expert_parallel, cast(Numerics, parallel.numerics)
        return layer_bytes(spec, place, layer, dtype, numerics, held, whole, own_formats, only_experts)

    has_experts = bool(_num_experts(spec))
    most = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    activations = step_bytes(spec, dtype, *most) + state_step_bytes(spec, *most)
    offload, own_weights = plan_offload(
        config, layout, machine, activations, stages, own_weights, bytes_of, has_experts
    )
    weights = own_weights if draft is None else tuple(map(operator.add, own_weights, draft.weights))
    adapters = plan_adapters(config, layout, spec, stages, dtype)
    passage = passage_bytes(layout, offload, own_weights)
    needed = _with_bytes(weights, adapters.num_bytes, () if draft is None else draft.spare_bytes, passage)
    states = plan_states(config, layout, machine, spec, stages, dtype, needed)
    needed = _with_bytes(needed, states)
    room = rank_room(config, layout, machine, spec, dtype, needed)
    beside = () if draft is None else draft.block_bytes
    cache, length = plan_cache(sized, layout, machine, spec, stages, needed, kv_dtype, room, beside)
    if draft is not None:
        assert model.draft is not None
        check_draft_length(config, draft.spec, length)
        draft = replace_struct(draft, spec=_spec_for_length(model.draft, draft.spec, length))
    check_splits(config, length)
    deployment = Deployment(
        model=model_source(config, model),
        spec=_spec_for_length(model, spec, length),
        dtype=dtype,
        weight_format=held,
        numerics=cast(Numerics, parallel.numerics),
        check_finite=config.model.check_finite,
        logprobs_mode=cast(LogprobsMode, config.model.logprobs_mode),
        embeds=embeds,
        machine=machine,
        device=layout.device,
        kernels=layout.kernels,
        grid=layout.grid,
        placements=layout.placements,
        stages=stages,
        expert_parallel=parallel.enable_expert_parallel,
        num_experts=_num_experts(spec),
        weights=weights,
        executor=layout.executor,
        collectives=layout.collectives,
        tries_symmetric_memory=_tries_symmetric_memory(layout, parallel),
        step_timeout=parallel.step_timeout or layout.step_timeout,
        connect_timeout=config.cluster.distributed_timeout_seconds,
        max_in_flight=max(2, layout.grid.pipeline),
        max_model_len=length,
        limits=_step_limits(config, layout, spec),
        cache=cache,
        adapters=adapters,
        state_bytes=states,
        offload=offload,
        expert_balancing=parallel.expert_balancing,
        host_models=(),
        reasons=(),
        warnings=(*layout.warnings, *(() if drafting is None else drafting.warnings), *_without_effect(config)),
        draft=draft,
        drafting=drafting,
    )
    return explain_choices(deployment, config, room)


def _with_bytes(weights: Sequence[RankWeights], *more: Sequence[int]) -> tuple[RankWeights, ...]:
    """The weights of ranks with more bytes of each; a sequence may be empty."""
    for added in filter(None, more):
        weights = [rank + RankWeights(num_bytes, 0) for rank, num_bytes in zip(weights, added, strict=True)]
    return tuple(weights)


def _on_own_ranks(config: EngineConfig, model: ModelDescription, machine: Machine) -> Deployment | None:
    """The draft model on ranks of its own; None: there are none."""
    asked = config.scheduler.speculation.draft
    if asked is None or not asked.ranks:
        return None
    assert model.draft is not None, "the draft model was not read"
    check_generates(f"the draft model {asked.model!r}", model.draft.spec())
    own = config_of_draft_ranks(config)
    try:
        return replace_struct(resolve(own, model.draft, share_machine(machine, config)), role="draft")
    except ValueError as error:
        raise ValueError(f"the draft model {asked.model!r} on draft_ranks {asked.ranks}: {error}") from None


def _plan_draft(
    config: EngineConfig,
    layout: Layout,
    model: ModelDescription,
    spec: DecoderSpec,
    dtype: DType,
    kv_dtype: KVDType,
    devices: tuple[Device, ...],
) -> DraftPlan | None:
    """The draft model beside `model`; None: none drafts."""
    asked = config.scheduler.speculation.draft
    if (drafts := model.draft) is None or asked is None or asked.ranks:
        assert asked is None or drafts is not None, "the draft model was not read"
        return None
    own, length = config_of_draft(config), config.model.max_model_len
    drafting = drafts.spec(length if isinstance(length, int) else None)
    check_draft(config, layout, spec, drafting)
    if drafts.checkpoint is not None:
        drafts.checkpoint.check(drafting, drafts.stored)
    held = choose_weight_format(own, drafts.stored, devices, layout.kernels)
    check_numerics(own, held, devices)
    apart = replace(layout, grid=grid_of_draft(config, layout.grid))
    weights = _rank_weights(own, apart, drafts, drafting, (Span(0, len(drafting.layers)),), dtype, held)
    return plan_draft(config, layout, model_source(own, drafts), spec, drafting, held, weights, dtype, kv_dtype)


def _embeds(config: EngineConfig, spec: DecoderSpec) -> bool:
    """Whether prompts are embedded or classified; a model that classifies cannot do anything else."""
    if spec.num_labels is None or config.embeds:
        return config.embeds
    if config.model.runner == "generate":
        raise ValueError(
            "the model classifies (ForSequenceClassification) and cannot generate: leave --runner out, or use "
            "--runner pooling"
        )
    if config.scheduler.speculation.num_speculative_tokens:
        raise ValueError("speculative_config drafts tokens, and this model classifies: leave it out")
    return True


def _without_effect(config: EngineConfig) -> list[str]:
    """Flags of several nodes on one node, which a forgotten --nnodes leaves alone. Launchers may pass them always."""
    cluster = config.cluster
    if cluster.has_nodes or config.places_with_ray:
        return []
    given = {"--master-addr": cluster.master_addr, "--join-token-file": cluster.join_token_file}
    fix = "say with --nnodes how many nodes there are, or leave it out"
    return [f"{flag} has no effect on one node; {fix}" for flag, value in given.items() if value is not None]


def _step_limits(config: EngineConfig, layout: Layout, spec: DecoderSpec) -> StepLimits:
    scheduler = config.scheduler
    limits = StepLimits(
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        scheduler.speculation,
        scheduler.long_prefill_token_threshold,
        # A step of 64 tokens takes a CPU twice as long as of 32; a GPU reads weights for longer than it computes 128.
        32 if layout.device == "cpu" else 128,
        spec.keeps_states,
    )
    if limits.drafts and spec.keeps_states:
        raise ValueError(
            f"speculative_config: layers of {spec.model_type} keep a state for each request, and not that before a "
            "wrong guess; leave speculative_config out"
        )
    if limits.drafts and layout.device == "cuda" and layout.kernels != "torch":
        raise ValueError(
            "speculative_config: the Triton kernels have no drafts yet; leave it out, or use --device cpu, or for the "
            "methods ngram and suffix --kernels torch"
        )
    if limits.speculation.draft is not None and layout.device != "cpu":
        raise ValueError(
            "speculative_config: draft models and heads run on CPUs only so far; use the method ngram or suffix, or "
            "--device cpu"
        )
    return limits


def _check_splits(parallel: ParallelConfig, spec: DecoderSpec) -> None:
    """Refuse sizes into which heads or experts cannot be split."""
    check_tensor_parallel(spec, parallel.tensor_parallel_size, parallel.context_parallel_size)
    if parallel.enable_expert_parallel:
        check_expert_parallel(spec, parallel.sharing, parallel.data_parallel_size)


def _check_balancing(parallel: ParallelConfig, layout: Layout, num_experts: int) -> None:
    """Refuse to move experts where a layout has no ranks for it, or where a move would change an answer, and copies
    beside one of each expert on each rank."""
    if not parallel.enable_eplb:
        return
    if layout.grid.expert == 1:
        raise ValueError("enable_eplb moves experts between ranks, and one rank has them all: leave it out")
    if layout.device == "cuda" and layout.kernels != "torch":
        raise ValueError("enable_eplb is not there for GPU kernels yet: leave it out, or use --kernels torch")
    if parallel.numerics == "fast" and layout.grid.expert == layout.grid.sharing:
        raise ValueError(
            "with numerics fast, the sum over experts depends on where they are, so enable_eplb would change answers: "
            "use --numerics exact"
        )
    copies, most = parallel.expert_balancing.num_redundant_experts, num_experts * (layout.grid.expert - 1)
    if copies > most:
        raise ValueError(
            f"num_redundant_experts {copies} is too many: with {most}, each rank has all {num_experts} experts already"
        )


def _tries_symmetric_memory(layout: Layout, parallel: ParallelConfig) -> bool:
    return layout.device == "cuda" and parallel.collectives == "auto" and not layout.splits_tensor_groups


def _own_formats(
    model: ModelDescription, spec: DecoderSpec, device: DeviceKind, held: FormatChoice
) -> OwnFormats | None:
    """The weights that keep the format in which the checkpoint has them; None: all have the format `held`."""
    if not held.open_format().reads_packed:
        return None
    return model.keep(("own formats", id(spec), device), lambda: _find_own_formats(model, spec, device))


def _find_own_formats(model: ModelDescription, spec: DecoderSpec, device: DeviceKind) -> OwnFormats:
    if isinstance(model.checkpoint, GGUFCheckpoint):
        form_of = model.checkpoint.forms(spec)  # a file mixes types
    else:
        form_of = stored_forms(StoredWeights(model.stored, spec.dtype, module_names(spec)), model.type_of)
    return own_formats(form_of, spec, device)


def _spec_for_length(model: ModelDescription, spec: DecoderSpec, length: int) -> DecoderSpec:
    """The spec for requests of up to `length` tokens. `spec` is the one for the requested length.

    Raises:
        ValueError: the two differ, so the available memory would decide the answers.
    """
    final = model.spec(length)
    if final.layers != spec.layers:
        raise ValueError(
            "this model's rope scaling depends on max_model_len, so the available memory would decide the answers; "
            f"set it yourself, for example --max-model-len {length}"
        )
    return final


def _check_alike(devices: tuple[Device, ...], layout: Layout, parallel: ParallelConfig) -> Layout:
    """The layout, with a warning if its GPUs are unlike.

    Raises:
        ValueError: their kernels have unlike bits, and numerics are to be exact.
    """
    names = list(dict.fromkeys(device.name for device in devices))
    where = f"ranks run on {' and '.join(names)}"
    bits = {device.name if layout.kernels == "torch" else device.capability for device in devices}
    fix = "choose equal GPUs with CUDA_VISIBLE_DEVICES"
    if len(bits) > 1 and parallel.numerics == "exact":
        raise ValueError(f"{where}, whose results have unlike bits; {fix}, or use --numerics fast")
    if len(names) == 1:
        return layout
    slow = f"{where}: all wait for the slowest and get the KV cache of the smallest; {fix}"
    return replace(layout, warnings=(*layout.warnings, slow))


def _head_copy_bytes(spec: DecoderSpec, grid: RankGrid, dtype: DType, held: FormatChoice) -> int:
    """torch on a CPU keeps a rank's part of a dense lm_head in float32 too, as logits are; see
    `kernels.torch.packed`."""
    if dtype == "float32" or not held.open_format().is_dense("lm_head"):
        return 0
    return -(-spec.vocab_size // grid.sharing) * spec.hidden_size * 4


def _rank_weights(
    config: EngineConfig,
    layout: Layout,
    model: ModelDescription,
    spec: DecoderSpec,
    stages: tuple[Span, ...],
    dtype: DType,
    held: FormatChoice,
) -> tuple[RankWeights, ...]:
    numerics = cast(Numerics, config.parallel.numerics)
    whole_experts = config.parallel.enable_expert_parallel
    redundant = config.parallel.expert_balancing.num_redundant_experts

    def find() -> tuple[RankWeights, ...]:
        own = _own_formats(model, spec, layout.device, held)
        found: dict[tuple[int, ...], RankWeights] = {}
        weights = []
        for place in map(layout.grid.place, range(layout.grid.world_size)):
            # Replicas have the same weights, unless they share experts.
            key = (place.pp_rank, place.share, place.dp_rank if whole_experts else 0)
            if key in found:
                weights.append(found[key])
                continue
            total = weight_bytes(spec, place, stages, dtype, numerics, held, whole_experts, own, redundant)
            touched = 0
            if layout.device == "cpu" and layout.kernels == "torch":
                is_last = place.pp_rank == len(stages) - 1
                total += _head_copy_bytes(spec, layout.grid, dtype, held) if is_last else 0
            elif layout.device == "cpu":
                largest = largest_weight_bytes(spec, place, stages, dtype, numerics, whole_experts)
                touched = max(0, total - min(largest, _MAPPED_BYTES))
            found[key] = RankWeights(total, touched)
            weights.append(found[key])
        return tuple(weights)

    return model.keep(
        (id(spec), layout.grid, layout.device, stages, dtype, held, numerics, whole_experts, redundant), find
    )


def _num_experts(spec: DecoderSpec) -> int:
    routings = [layer.feed_forward.routing for layer in spec.layers]
    return max((routing.num_experts for routing in routings if routing is not None), default=0)


def model_source(config: EngineConfig, model: ModelDescription) -> ModelSource:
    """Where this host finds the model."""
    files = model.files
    return ModelSource(
        name=files.name,
        folder=str(files.location),
        weight_files=tuple(map(str, files.weight_files)),
        load_format="dummy" if config.model.load_format == "dummy" else "gguf" if files.gguf else "safetensors",
        seed=config.model.seed,
        stored=model.stored,
        config_text=json.dumps(files.config, sort_keys=True),
        tokenizer_file=model.tokenizer_file,
    )
