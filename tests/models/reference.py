"""A DecoderSpec executed the plainest way: one sequence, dense masks, float32, no cache; none of the runtime's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.models.attention import GQA, Attention
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.indexer import Indexer
from shardline.models.linear_attention import LinearAttention
from shardline.models.mamba import Mamba2
from shardline.models.mla import MLA
from shardline.models.parts import Norm, QueryScale, Rope
from shardline.models.spec import DecoderSpec

Weights = Mapping[str, Tensor]


def forward(spec: DecoderSpec, weights: Weights, token_ids: Tensor) -> Tensor:
    """Logits [num_tokens, vocab_size] of one sequence of `token_ids` [num_tokens]."""
    positions = torch.arange(len(token_ids))
    hidden = weights["embed.weight"][token_ids] * spec.embedding_scale
    if spec.learned_positions is not None:
        hidden = hidden + weights["positions.weight"][positions]
    embedded = hidden
    caches: dict[int, tuple[Tensor, Tensor]] = {}
    unseen = positions[:, None] < positions
    for index, layer in enumerate(spec.layers):
        own = _below(weights, f"layers.{index}.")
        normed = _norm(layer.attention_norm, own, "attention_norm", hidden)
        if isinstance(layer.attention, MLA) and (indexer := layer.attention.indexer) and not indexer.is_shared:
            unseen = _not_chosen(layer.attention, indexer, own, normed, positions)
        update = _attention(layer.attention, own, normed, positions, unseen, caches, index)
        if layer.post_attention_norm is not None:
            update = _norm(layer.post_attention_norm, own, "post_attention_norm", update)
        hidden = hidden + update * layer.residual_scale
        if not layer.parallel:
            normed = _norm(layer.feed_forward_norm, own, "feed_forward_norm", hidden)
        update = _feed_forward(layer.feed_forward, _below(own, "feed_forward."), normed, hidden)
        if layer.post_feed_forward_norm is not None:
            update = _norm(layer.post_feed_forward_norm, own, "post_feed_forward_norm", update)
        hidden = hidden + update * layer.residual_scale
        if layer.token_input is not None:
            token_input = layer.token_input
            projected = _linear(own, "token_input.projection", embedded) * spec.hidden_size**-0.5
            projected = _norm(token_input.norm, weights, "token_input_norm", projected)
            row = own["token_input.embed.weight"][token_ids] * token_input.size**0.5
            gate = ACTIVATIONS[token_input.activation](_linear(own, "token_input.gate", hidden))
            update = _linear(own, "token_input.down", gate * (projected + row) * 0.5**0.5)
            hidden = hidden + _norm(token_input.norm, own, "token_input.norm", update)
        if layer.output_scale:
            hidden = hidden * own["output_scale.bias"]
    hidden = _norm(spec.final_norm, weights, "final_norm", hidden)
    logits = hidden @ weights["embed.weight" if spec.tied_embeddings else "lm_head.weight"].T
    if spec.lm_head_bias:
        logits = logits + weights["lm_head.bias"]
    return (logits if spec.logits_softcap is None else _softcap(logits, spec.logits_softcap)) * spec.logits_scale


def _attention(
    attention: Attention,
    weights: Weights,
    hidden: Tensor,
    positions: Tensor,
    unseen: Tensor,
    caches: dict[int, tuple[Tensor, Tensor]],
    index: int,
) -> Tensor:
    """`unseen` [tokens, keys] is for latent attention. `caches`: keys and values of the layers before, to which those
    of layer `index` are added."""
    if isinstance(attention, MLA):
        return _latent_attention(attention, weights, hidden, positions, unseen)
    if isinstance(attention, Mamba2):
        return _mamba(attention, weights, hidden)
    if isinstance(attention, LinearAttention):
        return _linear_attention(attention, weights, hidden)
    assert isinstance(attention, GQA)
    q, caches[index] = _project(attention, weights, hidden, positions, caches)
    return _grouped_attention(attention, weights, hidden, q, *caches[index], positions)


def _convolved(linear: LinearAttention, weights: Weights, hidden: Tensor) -> dict[str, Tensor]:
    """Queries, keys and values [num_tokens, key heads, ..]."""
    inputs = {}
    for part in "qkv":
        padded = F.pad(_linear(weights, f"attention.{part}", hidden), (0, 0, linear.conv_width - 1, 0))
        taps = padded.unfold(0, linear.conv_width, 1) * weights[f"attention.{part}_conv.weight"]
        total = taps.sum(-1) + weights.get(f"attention.{part}_conv.bias", 0.0)
        inputs[part] = F.silu(total).view(len(hidden), linear.num_heads, -1)
    return inputs


def _mamba(mamba: Mamba2, weights: Weights, hidden: Tensor) -> Tensor:
    """Token by token."""
    groups, each = mamba.num_heads, mamba.num_value_heads // mamba.num_heads
    inputs = _convolved(mamba, weights, hidden)
    x = inputs["v"].view(len(hidden), groups, each, mamba.value_head_dim)
    step = F.softplus(_linear(weights, "attention.step", hidden) + weights["attention.decay_offset.bias"])
    decay = torch.exp(-torch.exp(weights["attention.decay_log.bias"]) * step).view(len(hidden), groups, each, 1, 1)
    step = step.view(len(hidden), groups, each, 1)
    state, out = torch.zeros(groups, each, mamba.key_head_dim, mamba.value_head_dim), []
    for token in range(len(hidden)):
        state = decay[token] * state + torch.einsum("gk,gev->gekv", inputs["k"][token], step[token] * x[token])
        out.append(torch.einsum("gk,gekv->gev", inputs["q"][token], state))
    total = torch.stack(out) + weights["attention.skip.bias"].view(groups, each, 1) * x
    gated = (total.flatten(1) * F.silu(_linear(weights, "attention.z", hidden))).view(len(hidden), groups, -1)
    normed = gated / torch.sqrt(gated.pow(2).mean(-1, keepdim=True) + mamba.norm.eps)
    return _linear(weights, "attention.o", normed.flatten(1) * weights["attention.norm.weight"])


def _linear_attention(linear: LinearAttention, weights: Weights, hidden: Tensor) -> Tensor:
    """Token by token."""
    heads, each = linear.num_heads, linear.num_value_heads // linear.num_heads
    inputs = _convolved(linear, weights, hidden)
    q, k = (x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (inputs["q"], inputs["k"]))
    v = inputs["v"].view(len(hidden), heads, each, linear.value_head_dim)
    beta = torch.sigmoid(_linear(weights, "attention.beta", hidden)).view(len(hidden), heads, each, 1)
    decay = F.softplus(_linear(weights, "attention.decay", hidden) + weights["attention.decay_offset.bias"])
    decay = torch.exp(-torch.exp(weights["attention.decay_log.bias"]) * decay).view(len(hidden), heads, each, 1, 1)
    state, out = torch.zeros(heads, each, linear.key_head_dim, linear.value_head_dim), []
    for token in range(len(hidden)):
        state = decay[token] * state
        old = torch.einsum("hk,hekv->hev", k[token], state)
        state = state + torch.einsum("hk,hev->hekv", k[token], beta[token] * (v[token] - old))
        out.append(torch.einsum("hk,hekv->hev", q[token] * linear.key_head_dim**-0.5, state))
    normed = _norm(linear.norm, weights, "attention.norm", torch.stack(out)).flatten(1)
    return _linear(weights, "attention.o", normed * F.silu(_linear(weights, "attention.z", hidden)))


def _not_chosen(mla: MLA, indexer: Indexer, weights: Weights, hidden: Tensor, positions: Tensor) -> Tensor:
    """Whether a token [tokens, keys] does not attend to a key, by the choice of an indexer."""
    assert mla.positions.rope is not None
    rope = mla.positions.rope.changed(interleaved=indexer.interleaved)
    latent = _norm(mla.projections.q_norm, weights, "attention.q_norm", _linear(weights, "attention.q_down", hidden))
    query = _linear(weights, "attention.indexer_q", latent).view(len(hidden), indexer.num_heads, indexer.head_dim)
    key = _norm(
        Norm("layer", 1e-6, bias=True),
        weights,
        "attention.indexer_norm",
        _linear(weights, "attention.indexer_k", hidden),
    )
    query, key = _rotate(rope, query, positions), _rotate(rope, key[:, None], positions)[:, 0]
    scores = torch.einsum("qhd,kd->hqk", query, key).clamp(min=0)
    scores = torch.einsum("hqk,qh->qk", scores, _linear(weights, "attention.indexer_weights", hidden))
    unseen = positions[:, None] < positions
    order = scores.masked_fill(unseen, -math.inf).sort(dim=1, descending=True, stable=True)[1]
    return unseen | torch.ones_like(unseen).scatter(1, order[:, : indexer.top_k], False)


def _latent_attention(mla: MLA, weights: Weights, hidden: Tensor, positions: Tensor, unseen: Tensor) -> Tensor:
    """The expanded form: every head gets keys and values of its own out of the latent."""
    num_tokens, linears, rope = len(hidden), mla.projections, mla.positions.rope
    assert rope is not None
    if linears.q_norm is None:
        q = _linear(weights, "attention.q", hidden)
    else:
        q_latent = _norm(linears.q_norm, weights, "attention.q_norm", _linear(weights, "attention.q_down", hidden))
        q = _linear(weights, "attention.q_up", q_latent)
    q_nope, q_rope = q.view(num_tokens, mla.num_heads, -1).split([linears.nope_head_dim, linears.rope_head_dim], dim=-1)
    down = _linear(weights, "attention.kv_down", hidden)
    latent = _norm(linears.kv_norm, weights, "attention.kv_norm", down[:, : linears.kv_lora_rank])
    k_rope = _rotate(rope, down[:, None, linears.kv_lora_rank :], positions).expand(-1, mla.num_heads, -1)
    up = _linear(weights, "attention.kv_up", latent).view(num_tokens, mla.num_heads, -1)
    k_nope, v = up.split([linears.nope_head_dim, linears.value_head_dim], dim=-1)
    q = torch.cat([q_nope, _rotate(rope, q_rope, positions)], -1).transpose(0, 1)
    q = q * _query_factors(mla.positions.query_scale, positions)  # [heads, num_tokens, dim]
    k = torch.cat([k_nope, k_rope], -1).transpose(0, 1)
    scores = (q @ k.transpose(1, 2) * mla.score.scale).masked_fill(unseen, -math.inf)
    heads = scores.softmax(-1) @ v.transpose(0, 1)
    return _linear(weights, "attention.o", heads.transpose(0, 1).flatten(1))


def _project(
    gqa: GQA, weights: Weights, hidden: Tensor, positions: Tensor, caches: Mapping[int, tuple[Tensor, Tensor]]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Queries, and keys and values, all rotated, [num_tokens, heads, head_dim]."""
    num_tokens = len(hidden)
    if gqa.kv_source is not None:
        assert gqa.positions.rope is not None
        q = _linear(weights, "attention.q", hidden).view(num_tokens, -1, gqa.head_dim)
        return _rotate(gqa.positions.rope, _norm(gqa.norms.qk_norm, weights, "attention.q_norm", q), positions), caches[
            gqa.kv_source
        ]
    q, k = (_linear(weights, f"attention.{part}", hidden) for part in "qk")
    if gqa.projections.output_gate:
        q = q.view(num_tokens, gqa.num_heads, 2, gqa.head_dim)[:, :, 0].flatten(1)
    if gqa.norms.qk_norm is not None and gqa.norms.norms_all_heads:
        q, k = (_norm(gqa.norms.qk_norm, weights, f"attention.{part}_norm", x) for part, x in (("q", q), ("k", k)))
    q, k = (x.view(num_tokens, -1, gqa.head_dim) for x in (q, k))
    v = k
    if not gqa.projections.value_is_key:
        v = _linear(weights, "attention.v", hidden).view(num_tokens, -1, gqa.value_head_dim)
    v = v * gqa.projections.value_scale
    if gqa.norms.value_norm is not None:
        v = v / torch.sqrt(v.pow(2).mean(-1, keepdim=True) + gqa.norms.value_norm.eps)
    if gqa.norms.qk_norm is not None and not gqa.norms.norms_all_heads:
        q = _norm(gqa.norms.qk_norm, weights, "attention.q_norm", q)
        k = _norm(gqa.norms.qk_norm, weights, "attention.k_norm", k)
    if gqa.positions.rope is not None:
        q, k = _rotate(gqa.positions.rope, q, positions), _rotate(gqa.positions.rope, k, positions)
    if gqa.norms.rotated_norm is not None:
        q, k = (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + gqa.norms.rotated_norm.eps) for x in (q, k))
    q = q * _query_factors(gqa.positions.query_scale, positions)[:, 0, None, None] if gqa.positions.query_scale else q
    return q, (k, v)


def _grouped_attention(
    gqa: GQA, weights: Weights, hidden: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    num_tokens = len(q)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    if gqa.mask.chunked:
        assert gqa.window is not None
        visible &= positions[:, None] // gqa.window == positions[None, :] // gqa.window
    elif gqa.window is not None:
        visible &= distance < gqa.window
    heads = []
    for head in range(gqa.num_heads):
        kv_head = head // (gqa.num_heads // gqa.num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T * gqa.score.scale
        if gqa.score.softcap is not None:
            scores = _softcap(scores, gqa.score.softcap)
        scores = scores.masked_fill(~visible, -math.inf)
        if gqa.score.sinks:
            sink = weights["attention.sinks.bias"][head].expand(num_tokens, 1)
            scores = torch.cat([scores, sink], -1)
        heads.append(scores.softmax(-1)[:, :num_tokens] @ v[:, kv_head])
    attended = torch.cat(heads, -1)
    if gqa.projections.output_gate:
        gate = _linear(weights, "attention.q", hidden).view(num_tokens, gqa.num_heads, 2, gqa.head_dim)[:, :, 1]
        attended = attended * torch.sigmoid(gate.flatten(1))
    return _linear(weights, "attention.o", attended)


def _query_factors(scale: QueryScale | None, positions: Tensor) -> Tensor:
    """[num_tokens, 1]"""
    if scale is None:
        return torch.ones(len(positions), 1)
    return 1 + scale.beta * torch.log1p(((positions + scale.offset) // scale.length).float())[:, None]


def _rotate(rope: Rope, x: Tensor, positions: Tensor) -> Tensor:
    """`x` [num_tokens, heads, head_dim] rotated by complex multiplication."""
    half = len(rope.inv_freq)
    angles = positions[:, None].float() * torch.tensor(rope.inv_freq)
    turn = torch.polar(torch.full_like(angles, rope.attention_scaling), angles)[:, None]
    if rope.interleaved:
        pairs = torch.complex(x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) * turn
        rotated = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        rotated = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([rotated, x[..., 2 * half :]], -1)


def _feed_forward(feed_forward: Dense | MoE, weights: Weights, hidden: Tensor, stream: Tensor) -> Tensor:
    if isinstance(feed_forward, Dense) and not feed_forward.intermediate_size:
        return torch.zeros_like(hidden)
    if isinstance(feed_forward, Dense):
        return _dense(feed_forward, weights, hidden)
    moe = feed_forward
    if moe.own_norms is not None and moe.shared is not None:
        norm = moe.own_norms
        beside = _norm(norm, weights, "shared_output_norm", _dense(moe.shared, _below(weights, "shared."), hidden))
        routed_input = _norm(norm, weights, "router_norm", stream)
        experts = _experts(moe, weights, _norm(norm, weights, "experts_norm", stream), routed_input)
        return beside + _norm(norm, weights, "experts_output_norm", experts)
    if moe.latent is None:
        output = _experts(moe, weights, hidden, hidden)
    else:
        latent = hidden @ weights["latent_down.weight"].T
        output = _experts(moe, weights, latent, hidden) @ weights["latent_up.weight"].T
    if moe.shared is not None:
        gate = torch.sigmoid(hidden @ weights["shared_gate.weight"].T) if moe.shared_gate else 1.0
        output = output + gate * _dense(moe.shared, _below(weights, "shared."), hidden)
    return output


def _experts(moe: MoE, weights: Weights, hidden: Tensor, routed_input: Tensor) -> Tensor:
    logits = routed_input @ weights["router.weight"].T * moe.routing.logits_scale
    if moe.routing.logits_bias:
        logits = logits + weights["router_logits.bias"]
    chosen = route(moe.routing, logits, weights.get("router.bias"))
    if moe.routing.expert_scale:
        chosen = chosen * weights["expert_scale.bias"]
    output = torch.zeros_like(hidden)
    for expert in range(moe.routing.num_experts):
        rows = chosen[:, expert].nonzero()[:, 0]
        weight, own = chosen[rows, expert, None], _below(weights, f"experts.{expert}.")
        if moe.routing.scales_input:
            output[rows] += _dense(moe.expert, own, weight * hidden[rows])
        else:
            output[rows] += weight * _dense(moe.expert, own, hidden[rows])
    return output


def route(routing: Routing, logits: Tensor, bias: Tensor | None = None) -> Tensor:
    """The weight of every expert for every token [num_tokens, num_experts], zero for those not chosen."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    eligible = scores if bias is None else scores + bias
    groups = eligible.view(len(logits), routing.num_groups, -1)
    best = groups.topk(2, -1)[0].sum(-1) if routing.group_score == "top2_sum" else groups.amax(-1)
    chosen_groups = torch.zeros_like(best).scatter(1, best.topk(routing.top_groups, -1)[1], 1.0)
    eligible = groups.masked_fill(chosen_groups[..., None] == 0, -math.inf).flatten(1)
    ids = eligible.topk(routing.experts_per_token, -1)[1]
    chosen = torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids))
    return (chosen / chosen.sum(-1, keepdim=True) if routing.normalized else chosen) * routing.scale


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _dense(dense: Dense, weights: Weights, hidden: Tensor) -> Tensor:
    up = _linear(weights, "up", hidden)
    if dense.activation == "clamped_swish":
        gate = _linear(weights, "gate", hidden).clamp(max=7.0)
        return _linear(weights, "down", (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate))
    act = ACTIVATIONS[dense.activation]
    inner = act(_linear(weights, "gate", hidden)) * up if dense.gated else act(up)
    return _linear(weights, "down", inner)


def _norm(norm: Norm | None, weights: Weights, name: str, x: Tensor) -> Tensor:
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (weights[f"{name}.weight"] + norm.weight_offset)
    return y + weights[f"{name}.bias"] if norm.bias else y


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
