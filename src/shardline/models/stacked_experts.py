"""Checkpoints that store the experts of a layer in two tensors: gate and up in one of them, down in the other."""

from __future__ import annotations

from shardline.models.parameters import expert_of, parse_name
from shardline.models.spec import DecoderSpec, MoE, TensorSource


def stacked_expert_source(
    name: str, spec: DecoderSpec, module: str, *, transposed: bool = True, alternating: bool = False
) -> TensorSource | None:
    """The place of an expert's parameter below `model.layers.{i}.{module}`; None: `name` belongs to no expert.

    Quantizers may store each linear of each expert apart. Otherwise, weights are [experts, in, out] if they are
    `transposed`, else [experts, out, in]; biases are [experts, out]. The outputs of gate and up are `alternating`, or
    those of gate come first.
    """
    layer, part, kind = parse_name(name)
    expert = expert_of(part)
    if layer is None or expert is None:
        return None
    moe = spec.layers[layer].feed_forward
    assert isinstance(moe, MoE)
    projection = part.rpartition(".")[2]
    key = f"model.layers.{layer}.{module}.{'down_proj' if projection == 'down' else 'gate_up_proj'}"
    rows = None
    if projection != "down":
        size = moe.expert.intermediate_size
        is_up = projection == "up"
        rows = (int(is_up), size) if alternating else (size * is_up, size)
    return TensorSource(
        key if kind == "weight" else f"{key}_bias",
        transposed=transposed and kind == "weight",
        rows=rows,
        row_step=2 if alternating and rows is not None else 1,
        index=(expert, moe.routing.num_experts),
        apart=f"model.layers.{layer}.{module}.{expert}.{projection}_proj.{kind}",
    )
