"""Typed reading of a Hugging Face config.json. A wrong key raises a ValueError that names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_INTEGER = 1 << 48
MIN_NUMBER, MAX_NUMBER = 1e-20, 1e15
"""Far beyond what any model has. In these bounds, float32 neither overflows nor vanishes."""


@dataclass(frozen=True, eq=False)
class HFConfig:
    """A parsed config.json, or one section of it.

    Readers return the default if the key is missing. A key without a default is required. The `optional_*` readers
    return None for null, and the default for a missing key. The other readers treat null as missing, like transformers.
    """

    values: Mapping[str, Any]
    section_name: str = ""

    def with_values(self, *, defaults: Mapping[str, Any] | None = None, **values: Any) -> HFConfig:
        """The same configuration with other `values` of some keys, and with `defaults` of keys that it has not."""
        return HFConfig({**(defaults or {}), **self.values, **values}, self.section_name)

    def error(self, key: str, problem: str) -> ValueError:
        """A ValueError about `key`, for the caller to raise."""
        return ValueError(f"config.json: {self.section_name}{key} {problem}")

    def has(self, key: str) -> bool:
        """Whether the key exists and is not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, got {value!r}")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}, got {value!r:.40}")
        if value > maximum:
            raise self.error(key, f"must be at most {maximum}, got {value!r:.40}")
        return value

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """A positive whole number or null."""
        if self.has(key):
            return self.integer(key)
        return None if key in self.values else default

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number from MIN_NUMBER to MAX_NUMBER."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {value!r}")
        if not 0 < value < float("inf"):
            raise self.error(key, f"must be positive and finite, got {value!r:.40}")
        if not MIN_NUMBER <= value <= MAX_NUMBER:
            raise self.error(key, f"must be from {MIN_NUMBER:g} to {MAX_NUMBER:g}, got {value!r:.40}")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A positive number or null."""
        if self.has(key):
            return self.number(key)
        return None if key in self.values else default

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

    def _value(self, key: str, default: Any) -> Any:
        if self.has(key):
            return self.values[key]
        if default is None:
            raise self.error(key, "is missing")
        return default
