"""Shards and sizes: every element has its owners, and the formulas count what is really there."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shardline.checkpoints.lookup import decoder_spec
from shardline.config.topology import RankGrid
from shardline.models.adapters import EMBEDDING, adaptable_parameters, adapter_bytes, is_of_expert
from shardline.models.attention import GQA
from shardline.models.kv_groups import kv_groups
from shardline.models.mla import MLA
from shardline.models.parameters import kind_of, parameters, stage_parameters
from shardline.models.partition import ExpertShare, Span, split_heads
from shardline.models.sharding import Numerics, check_tensor_parallel, shard, shard_shape
from shardline.models.sizes import (
    attended_pairs,
    flops,
    kv_block_bytes,
    kv_bytes_per_token,
    num_parameters,
    stage_bubbles,
    stage_spans,
    weight_bytes,
)
from shardline.models.spec import DecoderSpec
from shardline.weights.base import PLAIN, FormatChoice
from tests.models.checkpoints import make_config, make_model
from tests.models.reference import forward
from tests.models.specs import decoder_specs

_NUMERICS: tuple[Numerics, ...] = ("exact", "fast")


def _fits(spec: DecoderSpec, tp_size: int) -> bool:
    try:
        check_tensor_parallel(spec, tp_size)
    except ValueError:
        return False
    return True


@settings(max_examples=40, deadline=None)
@given(
    spec=decoder_specs(max_layers=2),
    tp_size=st.integers(1, 6),
    numerics=st.sampled_from(_NUMERICS),
    expert_parallel=st.booleans(),
)
def test_shards_cover_every_parameter(
    spec: DecoderSpec, tp_size: int, numerics: Numerics, expert_parallel: bool
) -> None:
    if not _fits(spec, tp_size):
        return
    replicated_kv = any(
        isinstance(layer.attention, GQA) and tp_size > layer.attention.num_kv_heads for layer in spec.layers
    )
    for name, shape in parameters(spec):
        owners = np.zeros(shape, dtype=int)
        for rank in range(tp_size):
            experts = ExpertShare(rank, tp_size) if expert_parallel else None
            spans = shard(name, spec, rank, tp_size, numerics, experts)
            assert len(spans) == len(shape)
            where = tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)
            assert owners[where].shape == shard_shape(shape, spans)
            owners[where] += 1
        whole = "norm" in name or name.startswith("positions") or ".router." in name or ".shared_gate." in name
        whole |= name.endswith("token_input.projection.weight")
        split_input = not (expert_parallel and ".experts." in name)
        whole |= numerics == "fast" and split_input and name.endswith(("attention.o.bias", ".down.bias"))
        if whole:
            assert (owners == tp_size).all(), name
        elif replicated_kv and (".k." in name or ".v." in name):
            assert (owners >= 1).all(), name
        else:
            assert (owners == 1).all(), name


def test_the_split_dim_is_the_output_unless_fast() -> None:
    spec = decoder_spec({"model_type": "llama", "num_key_value_heads": 8})
    for part in ("attention.q", "attention.k", "attention.o", "feed_forward.up", "feed_forward.down"):
        rows, columns = shard(f"layers.0.{part}.weight", spec, 1, 4)
        assert rows is not None
        assert columns is None
    assert shard("layers.0.attention.o.weight", spec, 1, 4, "fast") == (None, Span(1024, 2048))
    assert shard("layers.0.feed_forward.down.weight", spec, 3, 4, "fast") == (None, Span(8256, 11008))
    with pytest.raises(ValueError, match="no canonical parameter name"):
        shard("layers.0.attention.r.weight", spec, 0, 1)


@settings(max_examples=40, deadline=None)
@given(
    spec=decoder_specs(),
    tp_size=st.integers(1, 5),
    num_stages=st.integers(1, 4),
    numerics=st.sampled_from(_NUMERICS),
    expert_parallel=st.booleans(),
)
def test_weight_bytes_count_what_each_rank_holds(
    spec: DecoderSpec, tp_size: int, num_stages: int, numerics: Numerics, expert_parallel: bool
) -> None:
    if not _fits(spec, tp_size) or num_stages > len(spec.layers):
        return
    grid, stages = RankGrid(tp_size, num_stages), stage_spans(spec, num_stages)
    everything = {name for name, _ in parameters(spec)}
    for rank in range(grid.world_size):
        place = grid.place(rank)
        experts = ExpertShare(place.tp_rank, tp_size) if expert_parallel else None
        held = dict(stage_parameters(spec, stages[place.pp_rank]))
        everything -= held.keys()
        arrays = [
            np.empty(shape, np.float32 if name.endswith("router.bias") else np.float16)[
                tuple(
                    slice(None) if span is None else slice(span.start, span.stop)
                    for span in shard(name, spec, place.tp_rank, tp_size, numerics, experts)
                )
            ]
            for name, shape in held.items()
        ]
        held_bytes = sum(array.nbytes for array in arrays)
        assert weight_bytes(spec, place, stages, "bfloat16", numerics, PLAIN, expert_parallel) == held_bytes
    assert not everything


@settings(deadline=None, max_examples=50)
@given(spec=decoder_specs(), size=st.integers(1, 5), whole_experts=st.booleans(), data=st.data())
def test_adapter_bytes_count_what_each_rank_holds(
    spec: DecoderSpec, size: int, whole_experts: bool, data: st.DataObject
) -> None:
    if not _fits(spec, size):
        return
    grid, stages = RankGrid(size, 1), stage_spans(spec, 1)
    changeable = sorted({kind_of(name) for name, _ in adaptable_parameters(spec)})
    kinds = data.draw(st.sets(st.sampled_from(changeable)).map(frozenset))
    for rank in range(size):
        share, held = ExpertShare(rank, size) if whole_experts else None, 0
        for name, (outputs, inputs) in adaptable_parameters(spec):
            if kind_of(name) not in kinds:
                continue
            if name == EMBEDDING:
                held += 2 * 7 * (inputs + outputs) + 4 * outputs
            else:
                span = shard(name, spec, rank, size, "exact", share)[0] or Span(0, outputs)
                is_absent = is_of_expert(name) and whole_experts and not span.size
                held += 0 if is_absent else 2 * 7 * (inputs + span.size) + 4 * span.size
        place = grid.place(rank)
        assert adapter_bytes(spec, place, stages, "bfloat16", 7, kinds, whole_experts=whole_experts) == held


def test_weight_bytes_of_a_known_model() -> None:
    spec = decoder_spec({"model_type": "llama"})
    assert num_parameters(spec) == 6_738_415_616
    one = weight_bytes(spec, RankGrid(1, 1).place(0), stage_spans(spec, 1), "bfloat16")
    assert one == 2 * 6_738_415_616
    assert num_parameters(decoder_spec({"model_type": "gpt2"})) == 124_439_808


def test_tied_embeddings_count_where_they_are_held() -> None:
    """In the first stage and in the last; once where these are one, unless the lm_head's copy is quantized."""
    spec = decoder_spec({"model_type": "gemma"})
    table = spec.vocab_size * spec.hidden_size
    place, stages = RankGrid(1, 1).place(0), stage_spans(spec, 1)
    assert weight_bytes(spec, place, stages, "bfloat16") == 2 * num_parameters(spec)
    two = stage_spans(spec, 2)
    halves = [weight_bytes(spec, RankGrid(1, 2).place(rank), two, "bfloat16") for rank in range(2)]
    assert sum(halves) == 2 * (num_parameters(spec) + table)
    untied = msgspec.structs.replace(spec, tied_embeddings=False)
    quantized = [weight_bytes(s, place, stages, "bfloat16", weight_format=FormatChoice("int8")) for s in (spec, untied)]
    assert quantized[0] == quantized[1]


def test_sizes_of_a_model_whose_last_layers_store_nothing() -> None:
    kinds = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(35)]
    sizes = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1}
    shared = {"layer_types": kinds, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
    spec = decoder_spec({"model_type": "gemma4_text", **sizes, **shared})  # Gemma 4 E2B
    assert num_parameters(spec) == 4_628_569_379
    assert 2.2e9 < flops(spec, 1) // 2 < 2.3e9  # the tables of the layers are not multiplied
    assert [group.layers for group in kv_groups(spec)][:2] == [(4, 9, 14), (0, 5, 10)]
    stages = stage_spans(spec, 3)
    assert stages[-1] == Span(13, 35)
    held = [weight_bytes(spec, RankGrid(1, 3).place(rank), stages, "bfloat16") for rank in range(3)]
    repeated = 2 * (262144 * 1536 + 256)  # every stage has the embedding
    factors = 2 * 35  # the layers' factors are in float32
    assert sum(held) == 2 * num_parameters(spec) + factors + 2 * repeated
    stored = [kv_bytes_per_token(spec, RankGrid(1, 3).place(rank), stages, "bfloat16") for rank in range(3)]
    assert (sum(stored), stored[-1]) == (2 * 2 * (12 * 256 + 3 * 512), 2 * 2 * (256 + 512))
    with pytest.raises(ValueError, match="layers 13 to 34 are in one stage; use 14 or fewer"):
        stage_spans(spec, 15)


def test_sizes_of_known_mixtures_of_experts() -> None:
    qwen = decoder_spec({"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128})
    assert num_parameters(qwen) == 30_532_122_624  # Qwen3-30B-A3B
    assert num_parameters(decoder_spec({"model_type": "mixtral"})) == 46_702_792_704
    assert num_parameters(decoder_spec({"model_type": "qwen2_moe"})) == 14_315_784_192  # Qwen1.5-MoE-A2.7B
    active = flops(qwen, 1) // 2
    assert 3.0e9 < active < 3.1e9


def test_quantized_weight_bytes_of_a_known_model() -> None:
    spec = decoder_spec({"model_type": "llama"})
    place, stages = RankGrid(1, 1).place(0), stage_spans(spec, 1)
    hidden, inner, vocab = 4096, 11008, 32000
    plain = 2 * (vocab * hidden + 65 * hidden)  # embedding and norms
    projections = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]
    head = vocab * (hidden + 4)
    int8 = 32 * sum(rows * (columns + 4) for rows, columns in projections)
    assert weight_bytes(spec, place, stages, "bfloat16", weight_format=FormatChoice("int8")) == plain + head + int8
    int4 = 32 * sum(rows * (columns // 2 + columns // 32 + 4) for rows, columns in projections)
    assert weight_bytes(spec, place, stages, "bfloat16", weight_format=FormatChoice("int4_fast")) == plain + head + int4


def test_stages_weigh_the_lm_head() -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8}
    light = decoder_spec({"model_type": "llama", **small, "vocab_size": 16})
    heavy = decoder_spec({"model_type": "llama", **small, "vocab_size": 1 << 17})
    assert [span.size for span in stage_spans(light, 2)] == [4, 4]
    first, last = stage_spans(heavy, 2)
    assert first.size > last.size
    assert [span.size for span in stage_spans(heavy, 2, "3,5")] == [3, 5]


def test_stages_weigh_the_experts_that_a_batch_chooses() -> None:
    """A token meets one of eight experts, a batch of 32 nearly all: by a token alone, the stages would be 7 and 1."""
    small = {"hidden_size": 64, "intermediate_size": 4096, "num_attention_heads": 4, "num_hidden_layers": 8}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1, "num_key_value_heads": 1, "vocab_size": 1 << 18}
    first, last = stage_spans(decoder_spec({"model_type": "mixtral", **small, **experts}), 2)
    assert (first.size, last.size) == (5, 3)


def test_stages_weigh_keys_and_values() -> None:
    """Of 32 sequences of 512 tokens, with 8 heads of 64 each; layers with a window of 32 tokens read a sixteenth: so
    32 to 40 sixteenths, which no other split has."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 16}
    kinds = ["full_attention"] * 4 + ["sliding_attention"] * 8
    windows = {"layer_types": kinds, "sliding_window": 32, "num_key_value_heads": 8, "num_hidden_layers": 12}
    spec = decoder_spec({"model_type": "gemma3_text", **small, **windows})
    assert stage_spans(spec, 2)[0].size == 2


def test_the_bubble_of_unequal_stages() -> None:
    """A layer reads 4 x 64 x 64 weights of attention, 3 x 64 x 64 of the block, two norms, and keys and values."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4}
    spec = decoder_spec({"model_type": "llama", **small, "vocab_size": 30000})
    layer, head = 7 * 64 * 64 + 2 * 64 + 32 * 512 * 2 * 64, 64 * 30000
    decode, prompts = stage_bubbles(spec, (Span(0, 3), Span(3, 4)))
    assert prompts == pytest.approx(1 - 4 / 2 / 3)
    assert decode == pytest.approx(1 - (4 * layer + head) / 2 / max(3 * layer, layer + head))
    assert stage_bubbles(spec, (Span(0, 2), Span(2, 4)))[1] == 0


@settings(max_examples=40, deadline=None)
@given(spec=decoder_specs(), tp_size=st.integers(1, 5), num_stages=st.integers(1, 4), block_size=st.integers(1, 32))
def test_kv_bytes(spec: DecoderSpec, tp_size: int, num_stages: int, block_size: int) -> None:
    if not _fits(spec, tp_size) or num_stages > len(spec.layers):
        return
    grid, stages = RankGrid(tp_size, num_stages), stage_spans(spec, num_stages)
    for rank in range(grid.world_size):
        place = grid.place(rank)
        stage = range(stages[place.pp_rank].start, stages[place.pp_rank].stop)
        per_layer = {}
        for index in stage:
            attention = spec.layers[index].attention
            if isinstance(attention, MLA):
                # All ranks of a stage share the latents, and account for even parts of them.
                latent_dim = attention.projections.kv_lora_rank + attention.projections.rope_head_dim
                per_layer[index] = 4 * (latent_dim // tp_size + (place.tp_rank < latent_dim % tp_size))
                continue
            assert isinstance(attention, GQA)
            own = split_heads(attention.num_heads, attention.num_kv_heads, tp_size)[place.tp_rank].kv_heads
            per_layer[index] = 4 * 2 * own.size * attention.head_dim
        assert kv_bytes_per_token(spec, place, stages, "float32") == sum(per_layer.values())
        deepest = max(sum(per_layer.get(index, 0) for index in group.layers) for group in kv_groups(spec))
        assert kv_block_bytes(spec, kv_groups(spec), place, stages, "float32", block_size) == block_size * deepest
        kinds = [(spec.layers[index].attention, size) for index, size in per_layer.items()]
        if mla := [kind for kind, _ in kinds if isinstance(kind, MLA)]:
            latents = sum(latent + 2 * rotated + 4 for _, latent, rotated in (kind.latent_sizes for kind in mla))
            assert kv_bytes_per_token(spec, place, stages, "float8_e4m3fn", latents_shared=False) == latents
            continue
        # A byte instead of four per element, and four more for the scale of each head's key and value.
        scales = sum(2 * 4 * size // (4 * 2 * kind.head_dim) for kind, size in kinds if isinstance(kind, GQA))
        assert kv_bytes_per_token(spec, place, stages, "int8") == sum(per_layer.values()) // 4 + scales
        assert kv_bytes_per_token(spec, place, stages, "float8_e4m3fn") == sum(per_layer.values()) // 4 + scales


@settings(deadline=None)
@given(num_tokens=st.integers(0, 40), context_len=st.integers(0, 40), window=st.none() | st.integers(1, 50))
def test_attended_pairs(num_tokens: int, context_len: int, window: int | None) -> None:
    pairs = sum(min(position + 1, window or position + 1) for position in range(context_len, context_len + num_tokens))
    assert attended_pairs(num_tokens, context_len, window) == pairs


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "qwen2_moe"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    config = make_config(family).to_dict()
    spec = decoder_spec(config)
    num_tokens = 17
    weights = {name: torch.zeros(shape) for name, shape in parameters(spec)}
    with FlopCounterMode(display=False) as counter:
        forward(spec, weights, torch.zeros(num_tokens, dtype=torch.long))
    # The reference computes the scores of hidden pairs too.
    wasted = sum(
        4
        * layer.attention.num_heads
        * layer.attention.head_dim
        * (num_tokens**2 - attended_pairs(num_tokens, 0, layer.attention.window))
        for layer in spec.layers
        if isinstance(layer.attention, GQA)
    )
    assert flops(spec, num_tokens, num_logits=num_tokens) + wasted == counter.get_total_flops()


def test_latent_attention_computes_in_the_latents_dims() -> None:
    """As many FLOPs as the expanded form that the reference computes, but for those of scores and outputs."""
    spec = decoder_spec(make_config("deepseek_v3").to_dict())
    mla = spec.layers[0].attention
    assert isinstance(mla, MLA)
    num_tokens = 17
    weights = {name: torch.zeros(shape) for name, shape in parameters(spec)}
    with FlopCounterMode(display=False) as counter:
        forward(spec, weights, torch.zeros(num_tokens, dtype=torch.long))
    per_pair = 2 * mla.num_heads * len(spec.layers)
    linears = mla.projections
    expanded = per_pair * num_tokens**2 * (linears.nope_head_dim + linears.rope_head_dim + linears.value_head_dim)
    absorbed = per_pair * attended_pairs(num_tokens, 0, None) * (2 * linears.kv_lora_rank + linears.rope_head_dim)
    assert flops(spec, num_tokens, num_logits=num_tokens) - absorbed == counter.get_total_flops() - expanded


def test_decode_flops_are_the_difference_of_two_prefills() -> None:
    spec = decoder_spec(make_config("gemma2").to_dict())
    assert flops(spec, 30, 0, 0) - flops(spec, 29, 0, 0) == flops(spec, 1, 29, 0)


def test_parameter_count_is_that_of_transformers() -> None:
    dense = ("llama", "qwen3", "gemma3_text", "phi3", "gpt2")
    for family in (*dense, "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2"):
        model = make_model(family)
        assert num_parameters(decoder_spec(model.config.to_dict())) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("size", "groups"), [(32, 3), (128, 1), (0, 1), (64, 2)])
def test_weights_that_a_checkpoint_has_packed(size: int, groups: int) -> None:
    packed = FormatChoice("packed", size).open_format()
    assert packed.num_bytes(8, 96, 2) == 8 * (96 // 2 + groups * 3)
    assert not packed.is_dense("layer")
    for role in ("lm_head", "expert"):
        assert packed.is_dense(role)
        assert packed.num_bytes(8, 96, 2, role) == 8 * 96 * 2


def test_only_layers_are_packed() -> None:
    spec = decoder_spec({"model_type": "mixtral", **_SMALL_MIXTRAL})
    place, stages = RankGrid(1, 1).place(0), stage_spans(spec, 1)
    held = (PLAIN, FormatChoice("packed", 32))
    plain, packed = (weight_bytes(spec, place, stages, "bfloat16", weight_format=one) for one in held)
    projections = [(64, 64), (32, 64), (32, 64), (64, 64)]
    saved = 2 * sum(rows * (2 * columns - (columns // 2 + columns // 32 * 3)) for rows, columns in projections)
    assert plain - packed == saved


_SMALL_MIXTRAL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
