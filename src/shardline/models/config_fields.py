"""Fields of a config.json that most model types have, with the names and defaults of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardline.models.feed_forward import Routing
from shardline.models.hf_config import HFConfig
from shardline.models.parts import Activation, DType

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
MAX_LAYERS = 1 << 12
"""Many more than any model has. A damaged configuration may state any number, and each layer takes memory."""
MAX_CONV_WIDTH = 16
"""Of linear attention, in its kernels."""
_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")


def read_activation(config: HFConfig, key: str, default: str) -> Activation:
    """A feed-forward activation, from its name in transformers."""
    name = config.text(key, default)
    if name not in _ACTIVATIONS:
        raise config.error(key, f"{name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_dtype(config: HFConfig) -> DType:
    """Type of the checkpoint. If the file does not say it, it is float32, as in transformers."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, "float32").removeprefix("torch.")
    for dtype in _DTYPES:
        if name == dtype:
            return dtype
    raise config.error(key, f"{name!r} is not supported; supported: {', '.join(_DTYPES)}")


def layer_windows(
    config: HFConfig,
    num_layers: int,
    window: int | None,
    default_types: Sequence[str],
    *,
    windowed: str = "sliding_attention",
    window_key: str = "sliding_window",
) -> list[int | None]:
    """The window of each layer: `window` if its type in `layer_types` is `windowed`, else None.

    `window_key` names the window in errors.
    """
    types = layer_types(config, num_layers, default_types, ("full_attention", windowed))
    if window is None and windowed in types:
        raise config.error("layer_types", f"has {windowed}, but {window_key} is not set or not in use")
    return [window if kind == windowed else None for kind in types]


def layer_types(config: HFConfig, num_layers: int, default_types: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """The type of each layer, one of `known`: `layer_types`, or `default_types` without this key."""
    types = config.values.get("layer_types")
    types = default_types if types is None else types
    if not isinstance(types, Sequence) or len(types) != num_layers:
        raise config.error("layer_types", f"must name {num_layers} layers (num_hidden_layers), got {types!r:.80}")
    if unknown := [kind for kind in types if kind not in known]:
        raise config.error("layer_types", f"has {unknown[0]!r}; supported: {', '.join(known)}")
    return types


def full_every(period: int, num_layers: int) -> list[str]:
    """The types of layers of which each `period`-th has full attention, and the others have a window."""
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(num_layers)]


def layer_flags(config: HFConfig, key: str, num_layers: int) -> list[bool]:
    """A list with a 0 or 1 for each layer.

    Raises:
        ValueError: it is missing, or something else.
    """
    flags = config.values.get(key)
    if not isinstance(flags, Sequence) or len(flags) != num_layers or not all(flag in (0, 1) for flag in flags):
        raise config.error(key, f"must have a 0 or 1 for each of {num_layers} layers, got {flags!r:.80}")
    return [bool(flag) for flag in flags]


class Defaults(NamedTuple):
    """The sizes of transformers for keys that are missing."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int
    """max_position_embeddings"""
    kv_heads: int | None = None
    """None: the number of heads."""
    head_dim: int | None = None
    """None: hidden_size / heads."""


@dataclass(frozen=True)
class Dims:
    """Sizes of every decoder, read from the keys that most model types use."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int


def read_dims(config: HFConfig, defaults: Defaults) -> Dims:
    """The sizes in `config`.

    Raises:
        ValueError: a size is not a positive whole number, or two sizes contradict each other.
    """
    hidden_size = config.integer("hidden_size", defaults.hidden)
    num_heads = config.integer("num_attention_heads", defaults.heads)
    num_kv_heads = config.optional_integer("num_key_value_heads", defaults.kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), got {num_kv_heads}")
    head_dim = config.optional_integer("head_dim", defaults.head_dim)
    if head_dim is None:
        head_dim = divided(config, "hidden_size", hidden_size, num_heads)
    return Dims(
        vocab_size=config.integer("vocab_size", defaults.vocab),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", defaults.intermediate),
        num_layers=config.integer("num_hidden_layers", defaults.layers, maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings", defaults.positions),
    )


def divided(config: HFConfig, key: str, size: int, num_heads: int) -> int:
    """Head size for a configuration that does not state it."""
    if size % num_heads:
        raise config.error(key, f"must be a multiple of the {num_heads} attention heads, got {size}")
    return size // num_heads


def read_conv_width(config: HFConfig, key: str) -> int:
    """The tokens that a convolution sees; 4 if the key is missing."""
    if (width := config.integer(key, 4)) > MAX_CONV_WIDTH:
        raise config.error(key, f"must be at most {MAX_CONV_WIDTH}, got {width}")
    return width


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
