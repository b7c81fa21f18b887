"""What fits: weights, KV cache and the rest of each GPU's memory, and the verdict on it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from shardline.checkpoints.description import with_draft
from shardline.checkpoints.quantization import usual_rules
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.kv_budget import gpu_left
from shardline.deployment.machine import Machine
from shardline.deployment.resolve import resolve
from shardline.models.kv_blocks import blocks_per_request, longest_request
from shardline.models.partition import Span
from shardline.models.parts import KVDType
from shardline.models.sizes import stage_spans, step_bytes
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import StoredRules, StoredWeights
from shardline.planner import vllm
from shardline.planner.catalog import describe
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GB, GIB
from shardline.planner.layout import HOST_AXES, Demand, Layout
from shardline.planner.models.parts.compressed import is_compressed
from shardline.planner.options import decisive_options
from shardline.planner.planned_model import PlannedModel

_PLAIN = "bf16"
_GENEROUS = 4
"""Times the wanted concurrency from which memory is generous."""
_CONTEXT_BYTES = int(0.55 * GIB)
"""Memory of the driver, kernels and NCCL: as vLLM's logs show it, since both engines use the same libraries."""
_EXPANDED = 1.3
"""Weights that are so many times larger than stored are expanded."""
_ROOMY_GIB = float(1 << 20)
"""Memory of GPUs on which everything fits: with them, `resolve` says how large weights are that do not fit."""


@dataclass(frozen=True)
class Fit:
    """How a layout uses the memory of its fullest GPU. All sizes in bytes for one GPU."""

    layout: Layout
    verdict: str
    weight_bytes: int
    """0: not known, since they cannot be divided like this."""
    other_bytes: int
    """The largest step, and what the libraries take."""
    kv_bytes: int
    """Room for the KV cache; negative: so much is missing."""
    kv_tokens: int
    """Tokens that the cache of one replica holds, as the engine counts them."""
    max_context: int
    """Tokens of the longest request that fits."""
    concurrency: float
    """Requests of max_model_len tokens that fit at once, over all replicas; a share of one counts as a share."""
    max_model_len: int
    why_not: str = ""
    """Why the engine refuses the layout, or what is missing; empty: it fits."""
    stages: tuple[Span, ...] = ()
    deployment: Deployment | None = None
    """Of a plan for this host: what would be started."""

    @property
    def fits(self) -> bool:
        return self.verdict != "no"

    @property
    def lora_memory(self) -> tuple[int, str]:
        """Bytes for LoRA, and what they hold. It runs on CPUs only, so plans for other hosts have none."""
        return (0, "") if self.deployment is None else self.deployment.lora_memory

    @property
    def requests(self) -> int:
        """Whole requests of max_model_len tokens that fit at once, each in one replica."""
        return whole_requests(self.concurrency, self.layout.data)


def whole_requests(concurrency: float, replicas: int) -> int:
    """Whole requests that fit, if there is room for `concurrency` over all replicas: no replica has a part of one."""
    return replicas * math.floor(concurrency / replicas + 1e-9)


def bits_label(model: PlannedModel) -> str:
    """The label of the checkpoint as it is stored."""
    if model.rules.label:
        return model.rules.label
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[model.spec.dtype]


@functools.lru_cache(maxsize=64)
def stored_weights(model: PlannedModel, label: str) -> StoredWeights:
    """The model's weights under a label: as the checkpoint stores them, or as such checkpoints usually do.

    Raises:
        ValueError: there is no such way of storing weights.
    """
    if label == bits_label(model):
        return model.stored()
    rules = {_PLAIN: StoredRules(), **usual_rules()}
    if label not in rules:
        known = dict.fromkeys((bits_label(model), *sorted(rules)))
        raise ValueError(f"weights {label!r}: known are {', '.join(known)}")
    return model.stored(rules[label])


def held_weights(model: PlannedModel, layout: Layout) -> StoredWeights:
    """The weights that a layout's engine multiplies with: this one makes those of GGUF files dense on GPUs.

    Raises:
        ValueError: see `stored_weights`.
    """
    if layout.engine == "shardline" and model.files is not None and layout.weights == bits_label(model):
        return model.stored(StoredRules())
    return stored_weights(model, layout.weights)


def packed_bytes(model: PlannedModel, fitted: Fit) -> int:
    """Bytes of a GPU's weights, if this engine kept them packed that it expands; 0: it keeps them packed."""
    layout = fitted.layout
    if layout.engine != "shardline" or not model.rules.rules or not fitted.weight_bytes:
        return 0
    stages = fitted.stages or stage_spans(model.spec, layout.pipeline)
    packed, _ = vllm.weight_bytes(model, stored_weights(model, layout.weights), layout, stages)
    return packed if fitted.weight_bytes >= _EXPANDED * packed else 0


def fit(model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand) -> Fit:
    """How `layout` of `model` uses the memory of `cluster`."""
    if layout.num_gpus > cluster.num_gpus:
        return _refused(
            model, layout, demand, f"the layout needs {layout.num_gpus} GPUs, and there are {cluster.num_gpus}"
        )
    if layout.engine == "vllm":
        return _fit_vllm(model, layout, cluster, demand)
    return _fit_shardline(model, layout, cluster, demand)


def _refused(model: PlannedModel, layout: Layout, demand: Demand, why: str) -> Fit:
    """A layout that no engine starts, with the weights of its fullest rank, if they can be divided so."""
    try:
        stages = stage_spans(model.spec, layout.pipeline)
        weights, _ = vllm.weight_bytes(model, held_weights(model, layout), layout, stages)
    except ValueError:
        weights = 0
    return Fit(layout, "no", weights, 0, 0, 0, 0, 0.0, demand.max_model_len, why)


def verdict_of(requests: int, wanted: int) -> str:
    """The verdict on room for so many whole requests of full length if `wanted` are wanted."""
    if requests < 1:
        return "no"
    if requests < wanted:
        return "tight"
    return "generous" if requests >= _GENEROUS * wanted else "comfortable"


def engine_config(model: PlannedModel, layout: Layout, demand: Demand, length: int) -> EngineConfig:
    """The configuration of this engine for a layout and requests of up to `length` tokens."""
    if demand.config is not None:
        return sized(demand.config, layout)
    changed = "none" if layout.weights == _PLAIN else layout.weights
    options = {
        "model": model.name,
        "max_model_len": length,
        "quantization": None if layout.weights == bits_label(model) else changed,
        **{f"{axis}_parallel_size": size for axis, size in layout.sizes.items()},
        "enable_expert_parallel": layout.whole_experts,
        "kv_cache_dtype": layout.kv,
        "gpu_memory_utilization": demand.utilization,
        "numerics": layout.numerics,
        "device": "cuda",
        "max_num_seqs": demand.max_num_seqs,
        "max_num_batched_tokens": demand.max_num_batched_tokens,
    }
    optional = ("max_num_seqs", "max_num_batched_tokens")
    given = {name: value for name, value in options.items() if value is not None or name not in optional}
    return EngineConfig.from_options(**{**decisive_options(demand.options), **given})


def sized(config: EngineConfig, layout: Layout) -> EngineConfig:
    """The configuration with the sizes of a layout."""
    sizes = {f"{axis}_parallel_size": getattr(layout, axis) for axis in HOST_AXES}
    return dataclasses.replace(config, parallel=config.parallel.divided(sizes, whole_experts=layout.whole_experts))


def _fit_shardline(model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand) -> Fit:
    why = ""
    try:
        config = engine_config(model, layout, demand, demand.max_model_len)
        description = with_draft(describe(model, checked=cluster.host is None), config)
        try:
            deployment = resolve(config, description, _machine(cluster, layout.num_gpus))
        except ValueError as refusal:
            if cluster.host is not None:
                raise
            # Perhaps only the memory does not do. Then the figures are those of GPUs that are large enough.
            why = str(refusal)
            deployment = resolve(config, description, _machine(cluster, layout.num_gpus, roomy=True))
    except ValueError as refusal:
        return _refused(model, layout, demand, why or str(refusal))
    return _measure(deployment, layout, cluster, demand, why)


@functools.lru_cache(maxsize=512)
def _machine(cluster: Cluster, num_gpus: int, *, roomy: bool = False) -> Machine:
    """The GPUs that a layout of `num_gpus` rents."""
    used = cluster.part(num_gpus)
    if roomy:
        used = dataclasses.replace(used, gpus=tuple(replace(gpu, usable_gib=_ROOMY_GIB) for gpu in used.gpus))
    return used.machine(_CONTEXT_BYTES)


def _measure(deployment: Deployment, layout: Layout, cluster: Cluster, demand: Demand, why: str) -> Fit:
    """The figures of a layout that `resolve` accepts, at least on larger GPUs (then `why` says why not on these)."""
    cache, limits, spec = deployment.cache, deployment.limits, deployment.spec
    drafting = deployment.draft.block_bytes if deployment.draft is not None else (0,) * len(cache.block_bytes)
    block_bytes = [own + more for own, more in zip(cache.block_bytes, drafting, strict=True)]
    weights, step = _rank_bytes(deployment)
    machine = _machine(cluster, layout.num_gpus)
    if isinstance(cache.pool, FixedPool):
        num_blocks = cache.pool.num_blocks - cache.context
        room = cache.pool.num_blocks * max(block_bytes)
        if cluster.host is None:
            why = why or _pool_shortage(room, cache_room(deployment, machine, layout.num_gpus, 1.0))
    else:
        room = cache_room(deployment, machine, layout.num_gpus, cache.pool.share)
        num_blocks = max(0, min(room // size for size in block_bytes if size) - 1)
    step_tokens = limits.max_num_batched_tokens
    replicas = layout.data
    length = deployment.max_model_len if cluster.host is not None else demand.max_model_len
    per_request = blocks_per_request(cache.groups, length, cache.block_size, step_tokens, cache.context)
    concurrency, most = replicas * num_blocks / per_request, spec.max_position_embeddings
    longest = longest_request(cache.groups, num_blocks, cache.block_size, step_tokens, most, cache.context)
    is_simple = len(cache.groups) == 1
    tokens = num_blocks * cache.block_size if is_simple else int(concurrency / replicas * length)
    fits = not why
    wanted = demand.concurrency if cluster.host is None else 1
    return Fit(
        layout,
        verdict_of(max(whole_requests(concurrency, replicas), 1) if fits else 0, wanted),
        weights,
        step if cluster.is_shared else step + _CONTEXT_BYTES,
        room,
        tokens,
        longest,
        concurrency if fits else 0.0,
        length,
        why,
        deployment.stages,
        deployment if cluster.host is not None else None,
    )


def _rank_bytes(deployment: Deployment) -> tuple[int, int]:
    """Bytes of the (weights, largest step and states) of the rank with the most."""
    limits = deployment.limits
    step = step_bytes(deployment.spec, deployment.dtype, limits.max_num_batched_tokens, limits.max_num_seqs)
    return max(rank.num_bytes for rank in deployment.weights), step + max(deployment.state_bytes, default=0)


def weights_note(fitted: Fit) -> str:
    """What of the weights, and of the KV cache's tokens, is the draft model's; empty: there is none."""
    deployment = fitted.deployment
    if deployment is None or deployment.draft is None:
        return ""
    draft = deployment.draft
    weights = max(rank.num_bytes for rank in draft.weights) / (1 << 20)
    share = max(draft.block_bytes) / deployment.cache.block_size
    return f"   {weights:,.1f} MiB of them the draft model's, and {share / 1e3:,.1f} kB of each token"


def storage_note(fitted: Fit, storage_gbs: float) -> tuple[str, str]:
    """When a rank reads weights from a disk, and what it reads, and how long that takes at a rate; empty: nothing."""
    read = fitted.deployment.file_bytes if fitted.deployment else 0
    if not read:
        return "", ""
    seconds = read / (storage_gbs * GB)
    assert fitted.deployment is not None
    if fitted.deployment.offload.expert_layers:
        rate = f"at {storage_gbs:.2f} GB/s, all of them take {seconds:.2f} s"
        return "read when tokens choose them", f"{read / GIB:.2f} GiB more of experts: {rate}"
    rate = f"at {storage_gbs:.2f} GB/s, a step takes {seconds:.2f} s or more"
    return "read in every step", f"{read / GIB:.2f} GiB more of weights: {rate}"


def cache_room(deployment: Deployment, machine: Machine, num_ranks: int, share: float) -> int:
    """Bytes that are left for the KV cache of each rank if `num_ranks` use a share of the machine's GPUs."""
    gpus = [host.devices[index] for host in machine.hosts for index in host.of_kind("cuda")]
    return gpu_left(gpus, num_ranks, share, *_rank_bytes(deployment))


def _pool_shortage(pool: int, left: int) -> str:
    """Why a KV cache of a given size does not fit the bytes that are left of a GPU; empty: it does."""
    if pool <= left:
        return ""
    return (
        f"the KV cache of {pool / GIB:.1f} GiB does not fit: weights, the largest step and libraries leave "
        f"{max(0, left) / GIB:.1f} GiB of a GPU"
    )


def _fit_vllm(model: PlannedModel, layout: Layout, cluster: Cluster, demand: Demand) -> Fit:
    spec = model.spec
    stored = stored_weights(model, layout.weights)
    why = vllm.refusal(spec, stored, layout)
    if not why and demand.max_model_len > spec.max_position_embeddings:
        why = f"the model has {spec.max_position_embeddings} positions"
    why = why or vllm.options_refusal(spec, demand.options)
    if why:
        return _refused(model, layout, demand, why)
    try:
        stages = stage_spans(spec, layout.pipeline, demand.options.get("pipeline_stages"))
    except ValueError as refusal:
        return _refused(model, layout, demand, str(refusal))
    gpu = cluster.part(layout.num_gpus).smallest
    num_seqs, num_tokens = vllm.step_limits(gpu, demand.max_num_seqs, demand.max_num_batched_tokens)
    weights, place = vllm.weight_bytes(model, stored, layout, stages)
    others = vllm.other_bytes(model, layout, num_seqs, num_tokens)
    block_size = demand.options.get("block_size", vllm.BLOCK_SIZE)
    size = vllm.request_size(spec, place, stages, kv_dtype(layout, spec), num_tokens, block_size)
    room, short = int(gpu.usable_bytes * demand.utilization) - weights - others, ""
    pool = vllm.given_pool(demand.options, size(block_size))
    if pool is not None:
        room, short = pool, _pool_shortage(pool, gpu.usable_bytes - weights - others)
    concurrency = layout.data * max(0, room) / size(demand.max_model_len)
    longest = _longest(room, size, spec.max_position_embeddings)
    tokens = int(concurrency / layout.data * demand.max_model_len)
    result = Fit(
        layout,
        verdict_of(whole_requests(concurrency, layout.data), demand.concurrency),
        weights,
        others,
        room,
        tokens,
        longest,
        concurrency,
        demand.max_model_len,
        "",
        stages,
    )
    if short:
        return dataclasses.replace(result, verdict="no", concurrency=0.0, why_not=short)
    return dataclasses.replace(result, why_not=_shortage(result, size)) if result.verdict == "no" else result


def kv_dtype(layout: Layout, spec: DecoderSpec) -> KVDType:
    """The type of keys and values in the cache. vLLM has no other than FP8 for compressed entries."""
    if is_compressed(spec):
        return "float8_e4m3fn"
    return {"auto": "bfloat16", "int8": "int8"}.get(layout.kv, "float8_e4m3fn")  # type: ignore[return-value]


def _longest(room: int, size: Callable[[int], int], most: int) -> int:
    """The longest request, up to `most` tokens, with `size(tokens)` bytes of at most `room`; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= room else (low, middle - 1)
    return low


def _shortage(result: Fit, size: Callable[[int], int]) -> str:
    if result.kv_bytes <= 0:
        return (
            f"weights need {result.weight_bytes / GIB:.1f} GiB and the rest {result.other_bytes / GIB:.1f}: "
            f"{-result.kv_bytes / GIB:.1f} GiB are missing"
        )
    needed = size(result.max_model_len) / GIB
    return (
        f"{result.max_model_len:,} tokens need {needed:.1f} GiB, {result.kv_bytes / GIB:.1f} are left; "
        f"{result.max_context:,} fit"
    )
