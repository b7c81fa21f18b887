"""What vLLM accepts, and how it divides a GPU's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardline.config.fields import parse_bytes
from shardline.config.topology import RankGrid, RankPlace
from shardline.models.attention import cached_token_bytes
from shardline.models.communication import count_layers
from shardline.models.partition import Span
from shardline.models.parts import KVDType
from shardline.models.sizes import state_bytes, step_bytes, stored_weight_bytes
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import StoredWeights
from shardline.planner.hardware import GIB, Gpu
from shardline.planner.layout import Layout
from shardline.planner.models.parts.compressed import (
    CacheRows,
    CompressedMQA,
    cache_rows,
    compressed_layers,
    is_compressed,
    state_rows,
)
from shardline.planner.planned_model import PlannedModel

BLOCK_SIZE = 16
_BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
"""The choices of --block-size."""
WHOLE_PARTS = ("attention.q_down", "attention.kv_down")
"""Parts that every rank has undivided: the projections down to latents are ReplicatedLinear."""
_LOGIT_COPIES = {False: 9.558, True: 3.0}
_HIDDEN_COPIES = 1.28
"""Peak of the profiled step: so many float32 logits of max_num_seqs rows, and so many hidden states of all tokens. Both
fitted to the five models of kv_capacity.csv whose start-up logs show it (vLLM 0.11, largest error 0.02 GiB). With an
image encoder, logs have no room for the sorted copies of the logits. See docs/planner.md."""
_CONTEXT_BYTES = {False: int(0.13 * GIB), True: int(0.55 * GIB)}
"""Memory outside of torch, without and with NCCL, from the same logs."""
_PAGE_ROWS, _COMPRESSED_BLOCK = 64, 256
"""Rows of a page of a window, and tokens of a block of compressed entries."""
_LARGE_GPU_GIB = 70.0
"""From this size on, vLLM's defaults are larger, except on A100 (EngineArgs._set_default_max_num_seqs_and_tokens)."""


def step_limits(gpu: Gpu, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) of `vllm serve` on a GPU: the given ones, else its defaults."""
    is_large = gpu.memory_gb >= _LARGE_GPU_GIB and "A100" not in gpu.name
    defaults = (1024, 8192) if is_large else (256, 2048)
    return max_num_seqs or defaults[0], max_num_batched_tokens or defaults[1]


def refusal(spec: DecoderSpec, stored: StoredWeights, layout: Layout) -> str:
    """Why vLLM would not start this layout; empty: it would."""
    tp = layout.tensor
    for attention in dict.fromkeys(layer.attention for layer in spec.layers):
        if attention.num_heads % tp:
            return f"vLLM needs a tensor-parallel size that divides the {attention.num_heads} attention heads, not {tp}"
        if attention.output_groups % tp:
            return f"vLLM cannot share {attention.output_groups} groups of outputs among {tp} ranks"
        if attention.num_kv_heads % tp and tp % attention.num_kv_heads:
            return f"vLLM cannot share {attention.num_kv_heads} KV heads among {tp} ranks"
    if layout.kv.startswith("int"):
        return f"vLLM has no KV cache in {layout.kv}, only in floats of 8 bits"
    if layout.pipeline > len(spec.layers):
        return f"{layout.pipeline} stages need as many layers, and the model has {len(spec.layers)}"
    has_experts = any(layer.feed_forward.routing for layer in spec.layers)
    if layout.whole_experts and not has_experts:
        return "expert parallelism needs a model with experts"
    return _block_refusal(spec, stored, layout)


def options_refusal(spec: DecoderSpec, options: Mapping[str, Any]) -> str:
    """Why vLLM would not start with the given engine options, or a plan cannot count them; empty: neither."""
    size = options.get("block_size", BLOCK_SIZE)
    if size not in _BLOCK_SIZES:
        return f"vLLM has no blocks of {size} tokens; use one of {', '.join(map(str, _BLOCK_SIZES))}"
    if "block_size" in options and is_compressed(spec):
        return f"the blocks of compressed entries have {_COMPRESSED_BLOCK} tokens; leave --block-size out"
    attentions = [layer.attention for layer in spec.layers]
    is_uneven = any(not one.key_dim or one.window is not None for one in attentions)
    if "num_gpu_blocks_override" in options and (is_uneven or is_compressed(spec)):
        return "blocks of unlike layers differ in size; use --kv-cache-memory instead of --num-gpu-blocks-override"
    return ""


def given_pool(options: Mapping[str, Any], block_bytes: int) -> int | None:
    """Bytes of the KV cache of a GPU that the options state; None: it is what is left of the memory."""
    if "num_gpu_blocks_override" in options:
        return int(options["num_gpu_blocks_override"]) * block_bytes
    memory = options.get("kv_cache_memory")
    return None if memory is None else parse_bytes(memory)


def _block_refusal(spec: DecoderSpec, stored: StoredWeights, layout: Layout) -> str:
    """vLLM refuses ranks whose part of a weight is not made of whole blocks of its quantization."""
    seen: set[object] = set()
    for index, layer in enumerate(spec.layers):
        kind = (id(layer.feed_forward), stored.layer_class(index))
        if kind in seen:
            continue
        seen.add(kind)
        is_expert, block = layer.feed_forward.routing is not None, layer.feed_forward.block
        packing = stored.packing(f"layers.{index}.feed_forward.{'experts.0.' * is_expert}down.weight")
        ranks = 1 if is_expert and layout.whole_experts else layout.tensor
        if packing is None or ranks == 1:
            continue
        unit = packing.block_columns if packing.block_rows > 1 else 1
        if block.intermediate_size % ranks or (block.intermediate_size // ranks) % unit:
            return (
                f"vLLM cannot split an intermediate size of {block.intermediate_size}, in blocks of {unit}, among "
                f"{ranks} ranks" + ("; use expert parallelism" if is_expert else "")
            )
    return ""


def weight_bytes(
    model: PlannedModel, stored: StoredWeights, layout: Layout, stages: Sequence[Span]
) -> tuple[int, RankPlace]:
    """(bytes, place) of the weights of the rank that has the most."""
    return _weight_bytes(model, stored, grid_of(layout), tuple(stages), layout.whole_experts)


@functools.lru_cache(maxsize=1024)
def _weight_bytes(
    model: PlannedModel, stored: StoredWeights, grid: RankGrid, stages: tuple[Span, ...], whole_experts: bool
) -> tuple[int, RankPlace]:
    """See `weight_bytes`. Layouts that differ only in their KV cache, or in the number of replicas, share it."""
    places = [grid.place(rank) for rank in range(0, grid.replica_size, grid.sharing)]
    spec = model.spec
    sizes = [
        stored_weight_bytes(spec, place, stages, stored, whole=WHOLE_PARTS, expert_parallel=whole_experts)
        + _absorbed_bytes(spec, place, stages)
        for place in places
    ]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return sizes[largest] + 2 * model.other_parameters, places[largest]


def grid_of(layout: Layout) -> RankGrid:
    """The ranks that hold one set of weights."""
    data = layout.data if layout.whole_experts else 1
    return RankGrid(layout.tensor, layout.pipeline, layout.context, data, layout.expert_ranks)


def _absorbed_bytes(spec: DecoderSpec, place: RankPlace, stages: Sequence[Span]) -> int:
    """Latent attention keeps a second, unquantized copy of the up-projections in the absorbed form."""
    stage, ranks = stages[place.pp_rank], len(place.peers("tensor"))
    return sum(2 * layer.attention.absorbed_size(ranks) for layer in spec.layers[stage.start : stage.stop])


def kv_flag(spec: DecoderSpec, layout: Layout) -> str:
    """The value of --kv-cache-dtype. For compressed entries there is one only, which has to be named."""
    return "fp8" if is_compressed(spec) else layout.kv


def other_bytes(model: PlannedModel, layout: Layout, num_seqs: int, num_tokens: int) -> int:
    """Memory of a GPU beside weights and KV cache: the profiled step, and what torch does not manage."""
    spec, has_encoder = model.spec, model.other_parameters > 0
    sampled = _LOGIT_COPIES[has_encoder] * 4 * num_seqs * spec.vocab_size
    sampled += _HIDDEN_COPIES * 2 * num_tokens * spec.hidden_size
    forward = step_bytes(spec, "bfloat16", num_tokens, 0) // layout.tensor
    return int(max(sampled, forward)) + _CONTEXT_BYTES[layout.tensor * layout.pipeline > 1]


def request_size(
    spec: DecoderSpec,
    place: RankPlace,
    stages: Sequence[Span],
    dtype: KVDType,
    num_tokens: int,
    block_size: int = BLOCK_SIZE,
) -> Callable[[int], int]:
    """The function from the length of a request, in tokens, to the bytes of its KV cache and states on a rank.

    A windowed layer holds the window, a step of `num_tokens` tokens, and one block (SlidingWindowSpec). States of
    compressors are kept in the same way.
    """
    tensor = len(place.peers("tensor"))
    counted = count_layers(spec, stages[place.pp_rank])
    kinds = _compressed_blocks(compressed_layers(counted), dtype) or [
        _Blocks(attention.window, block_size, int(count * block_size * cached_token_bytes(attention, tensor, dtype)))
        for attention, count in [(layer.attention, count) for layer, count in counted]
        if attention.key_dim
    ]
    states = state_bytes(spec, place, stages)

    def size(length: int) -> int:
        total = states
        for window, tokens, num_bytes in kinds:
            held, extra = (length, 0) if window is None else (min(window - 1 + num_tokens, length), 1)
            total += (-(-held // tokens) + extra) * num_bytes
        return total

    return size


class _Blocks(NamedTuple):
    """What some layers allocate for a request."""

    window: int | None
    """Tokens before the newest that they keep; None: all."""
    tokens: int
    """Tokens of a block."""
    num_bytes: int
    """Bytes of a block of all these layers."""


def _compressed_blocks(layers: Sequence[tuple[CompressedMQA, int]], dtype: KVDType) -> list[_Blocks]:
    """The blocks of (attention, number of layers) with compressed entries.

    A block of entries stands for 256 tokens. Windows and the states of compressors have pages as large as 64 entries,
    of as many tokens as fit (a power of two). States of an indexer have pages as large as 64 of its keys. Windows are
    in two groups of layers, and all groups are as deep as the deepest, since they share their memory. This is how vLLM
    0.2x divides it; published logs of Flash show 3.2e9 bytes for a request beside those for its tokens, and 6.80e9
    bytes for a request of 912,128 tokens, and this gives 3.1e9 and 6.8e9.
    """
    if not layers:
        return []
    depth = max((-(-sum(count for _, count in layers) // 2), *(count for layer, count in layers if layer.ratio)))
    blocks: dict[_Blocks, None] = {}
    for attention, _ in layers:
        window, entries, keys = cache_rows(attention, dtype)
        page = _PAGE_ROWS * window.num_bytes
        blocks[_Blocks(window.window, _PAGE_ROWS, 2 * page * depth)] = None
        for rows in (entries, keys):
            if rows is not None:
                num_bytes = _COMPRESSED_BLOCK // rows.ratio * rows.num_bytes * depth
                blocks[_Blocks(None, _COMPRESSED_BLOCK, num_bytes)] = None
        key_page = 0 if keys is None else _PAGE_ROWS * keys.num_bytes
        for state, size in zip(state_rows(attention), (page, key_page), strict=True):
            if state is not None:
                blocks[_Blocks(state.window, _tokens_in(size, state), size * depth)] = None
    return list(blocks)


def _tokens_in(page: int, rows: CacheRows) -> int:
    """The largest power of two of rows that fit in a page."""
    return 1 << ((page // rows.num_bytes).bit_length() - 1)
