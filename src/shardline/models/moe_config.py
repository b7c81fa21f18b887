"""Reading what a config.json says about experts."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.models.hf_config import HFConfig
from shardline.models.spec import Routing


def read_routing(config: HFConfig, *, num_experts: int, experts_per_token: int, normalized: bool) -> Routing:
    """Softmax routing. The arguments are the defaults of transformers for missing keys.

    The number of experts is in num_experts or in num_local_experts: transformers writes and reads both keys.

    Raises:
        ValueError: a number is not positive, or a token has to choose more experts than there are.
    """
    key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    count = config.integer(key, num_experts)
    chosen = config.integer("num_experts_per_tok", experts_per_token)
    if chosen > count:
        raise config.error("num_experts_per_tok", f"must be at most {key} ({count}), got {chosen}")
    return Routing(count, chosen, normalized=normalized)


def sparse_layers(config: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer has experts: every decoder_sparse_step-th layer has, except those in mlp_only_layers.

    Raises:
        ValueError: mlp_only_layers is not a list of layer numbers.
    """
    step = config.integer("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers") or ()
    if not isinstance(dense, Sequence) or not all(isinstance(index, int) for index in dense):
        raise config.error("mlp_only_layers", f"must be a list of layer numbers, got {dense!r:.80}")
    return [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]
