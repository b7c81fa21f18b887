"""Typed reading of a Hugging Face config.json. A wrong key raises a ValueError that names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardline.models.spec import Activation, DType

T = TypeVar("T")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")


class HFConfig:
    """A parsed config.json, or one section of it.

    Readers return the default if the key is missing. A key without a default is required. The `optional_*` readers
    return None for null, and the default for a missing key. The other readers treat null as missing, like transformers.
    """

    def __init__(self, values: Mapping[str, Any], section: str = "") -> None:
        self.values = values
        self.section_name = section

    def error(self, key: str, problem: str) -> ValueError:
        """A ValueError about `key`, for the caller to raise."""
        return ValueError(f"config.json: {self.section_name}{key} {problem}")

    def has(self, key: str) -> bool:
        """Whether the key exists and is not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, got {value!r}")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}, got {value}")
        return value

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """A positive whole number or null."""
        return self.integer(key) if self.has(key) else self._null_or(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {value!r}")
        if not 0 < value < float("inf"):
            raise self.error(key, f"must be positive and finite, got {value}")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A positive number or null."""
        return self.number(key) if self.has(key) else self._null_or(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        values = self._value(key, None)
        if not isinstance(values, Sequence) or len(values) != count:
            raise self.error(key, f"must be a list of {count} numbers, got {values!r:.80}")
        items = HFConfig({str(i): value for i, value in enumerate(values)}, f"{self.section_name}{key}.")
        return tuple(items.number(str(i)) for i in range(count))

    def sizes(self, key: str, count: int) -> tuple[int, ...]:
        """A list of `count` positive whole numbers."""
        numbers = self.numbers(key, count)
        if any(number != int(number) for number in numbers):
            raise self.error(key, f"must be a list of {count} whole numbers, got {list(numbers)}")
        return tuple(map(int, numbers))

    def names(self, key: str) -> tuple[str, ...]:
        """A list of strings. It is empty if the key is missing or null."""
        values = self.values.get(key)
        if values is None:
            return ()
        if isinstance(values, str) or not isinstance(values, Sequence) or not all(isinstance(v, str) for v in values):
            raise self.error(key, f"must be a list of names, got {values!r:.80}")
        return tuple(values)

    def section(self, key: str) -> HFConfig:
        """A nested object. It is empty if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {value!r}")
        return HFConfig(value, f"{self.section_name}{key}.")

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value outside `allowed`, since it would change the computation. Missing and null are accepted."""
        if self.has(key) and self.values[key] not in allowed:
            raise self.error(key, f"{self.values[key]!r} is not supported for this model type")

    def activation(self, key: str, default: str) -> Activation:
        """A feed-forward activation, from its name in transformers."""
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise self.error(key, f"{name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def dtype(self) -> DType:
        """Type of the checkpoint. If the file does not say it, it is float32, as in transformers."""
        key = "dtype" if self.has("dtype") else "torch_dtype"
        name = self.text(key, "float32").removeprefix("torch.")
        for dtype in _DTYPES:
            if name == dtype:
                return dtype
        raise self.error(key, f"{name!r} is not supported; supported: {', '.join(_DTYPES)}")

    def layer_windows(
        self,
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
        types = self.values.get("layer_types")
        types = default_types if types is None else types
        if not isinstance(types, Sequence) or len(types) != num_layers:
            raise self.error("layer_types", f"must name {num_layers} layers (num_hidden_layers), got {types!r:.80}")
        windows: list[int | None] = []
        for kind in types:
            if kind not in ("full_attention", windowed):
                raise self.error("layer_types", f"has {kind!r}; supported: full_attention, {windowed}")
            if kind == windowed and window is None:
                raise self.error("layer_types", f"has {windowed}, but {window_key} is not set or not in use")
            windows.append(window if kind == windowed else None)
        return windows

    def _value(self, key: str, default: Any) -> Any:
        if self.has(key):
            return self.values[key]
        if default is None:
            raise self.error(key, "is missing")
        return default

    def _null_or(self, key: str, default: T | None) -> T | None:
        return None if key in self.values else default


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


def read_dims(
    config: HFConfig,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    max_position_embeddings: int,
) -> Dims:
    """The sizes in `config`. The arguments are the defaults of transformers for missing keys.

    `num_kv_heads` None: the number of heads. `head_dim` None: hidden_size / heads.

    Raises:
        ValueError: a size is not a positive whole number, or two sizes contradict each other.
    """
    hidden_size = config.integer("hidden_size", hidden_size)
    num_heads = config.integer("num_attention_heads", num_heads)
    num_kv_heads = config.optional_integer("num_key_value_heads", num_kv_heads) or num_heads
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads}), got {num_kv_heads}")
    head_dim = config.optional_integer("head_dim", head_dim)
    if head_dim is None:
        head_dim = divided(config, "hidden_size", hidden_size, num_heads)
    return Dims(
        vocab_size=config.integer("vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", intermediate_size),
        num_layers=config.integer("num_hidden_layers", num_layers),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=config.integer("max_position_embeddings", max_position_embeddings),
    )


def divided(config: HFConfig, key: str, size: int, num_heads: int) -> int:
    """Head size for a configuration that does not state it."""
    if size % num_heads:
        raise config.error(key, f"must be a multiple of the {num_heads} attention heads, got {size}")
    return size // num_heads
