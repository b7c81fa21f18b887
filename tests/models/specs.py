"""Random decoder specs for hypothesis: any legal shape, however odd."""

from __future__ import annotations

from hypothesis import strategies as st

from shardline.models.attention import GQA, Attention, HeadNorms, Mask, Positions, Projections, Score
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.mla import MLA, LatentProjections
from shardline.models.parts import Norm, Rope
from shardline.models.spec import DecoderSpec, Layer, TokenInput


@st.composite
def decoder_specs(draw: st.DrawFn, max_layers: int = 8) -> DecoderSpec:
    """Specs with every part switched on or off: windows that differ by layer, or latent attention in all of them."""
    num_kv_heads = draw(st.integers(1, 4))
    norm = Norm(draw(st.sampled_from(["rms", "layer"])), 1e-5, bias=draw(st.booleans()))
    extra_norm = norm if draw(st.booleans()) else None
    gated, bias, qkv_bias, output_bias = (draw(st.booleans()) for _ in range(4))
    head_dim = draw(st.integers(1, 5))
    num_heads = num_kv_heads * draw(st.integers(1, 4))
    intermediate_size = draw(st.integers(8, 40))
    windows = draw(st.lists(st.sampled_from([None, None, 4, 7]), min_size=1, max_size=max_layers))
    linears = LatentProjections(
        draw(st.integers(1, 12)),
        head_dim,
        2,
        draw(st.integers(1, 5)),
        norm,
        q_lora_rank=None if extra_norm is None else draw(st.integers(1, 12)),
        q_norm=extra_norm,
        bias=qkv_bias,
    )
    latent = MLA(num_heads, linears, Score(1.0), Positions(Rope((1.0,))))
    attentions: list[Attention] = [
        GQA(
            num_heads,
            Projections(num_kv_heads, head_dim, qkv_bias, output_bias),
            Score(1.0),
            mask=Mask(window),
            norms=HeadNorms(extra_norm),
        )
        for window in windows
    ]
    if draw(st.integers(0, 3)) == 0:
        attentions = [latent] * len(windows)
    dense = Dense(intermediate_size, "silu", gated=gated, bias=bias)
    shared = dense if draw(st.booleans()) else None
    moe = MoE(
        Routing(draw(st.integers(6, 9)), 2, correction_bias=draw(st.booleans())), dense, shared, shared is not None
    )
    token_input = TokenInput(draw(st.integers(3, 9)), 20, "silu", norm) if draw(st.integers(0, 3)) == 0 else None
    layers = tuple(
        Layer(
            attention,
            moe if draw(st.booleans()) else dense,
            norm,
            norm,
            extra_norm,
            extra_norm,
            token_input=token_input,
        )
        for attention in attentions
    )
    return DecoderSpec(
        model_type="llama",
        vocab_size=draw(st.integers(8, 50)),
        hidden_size=draw(st.integers(8, 40)),
        layers=layers,
        final_norm=norm,
        max_position_embeddings=64,
        dtype="float32",
        tied_embeddings=draw(st.booleans()),
        learned_positions=draw(st.sampled_from([None, 64])),
        lm_head_bias=draw(st.booleans()),
    )
