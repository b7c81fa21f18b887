"""What a checkpoint stores: which weights are quantized, and how many bytes each tensor has.

The planner counts bytes with this, and the engine loads what has layouts (`stored_layout.py`).
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.models.parameters import is_kept_in_float32, is_linear, parse_name
from shardline.models.parts import DTYPE_BYTES, DType, Shape
from shardline.models.stored_layout import Form, Layout

_NUMBERED_LAYER = re.compile(r"\blayers\.(\d+)\b")
_WRAPPERS = ("language_model.", "model.language_model.")


class Packing(msgspec.Struct, frozen=True):
    """How one weight [rows, columns] is stored: elements of `bits`, and a scale for each block of elements."""

    label: str
    """Name for people and for choosing: "nvfp4", ..."""
    bits: int
    block_rows: int = 0
    """Rows of a block; 0: all."""
    block_columns: int = 0
    """Columns of a block; 0: all."""
    scale_bytes: int = 0
    zero_bits: int = 0
    """Bits of a block's zero point; 0: there is none."""
    column_bytes: int = 0
    """Bytes of a table with an entry per column (GPTQ's order of groups)."""
    tensor_bytes: int = 0
    """Bytes of the scales of the whole tensor."""

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight [rows, columns] with its scales; 0 if it has no elements."""
        if not rows or not columns:
            return 0
        blocks = -(-rows // (self.block_rows or rows)) * -(-columns // (self.block_columns or columns))
        elements = -(-rows * columns * self.bits // 8)
        per_block = blocks * self.scale_bytes + -(-blocks * self.zero_bits // 8)
        return elements + per_block + columns * self.column_bytes + self.tensor_bytes


class PackingRule(msgspec.Struct, frozen=True):
    """A packing, and the modules of the checkpoint to which it applies."""

    packing: Packing
    targets: tuple[str, ...] = ("Linear",)
    """Patterns of module names; "Linear" matches every linear layer. See `ModulePatterns`."""
    only_experts: bool = False
    layouts: tuple[Layout, ...] = ()
    """How the tensors of such a module may look; empty: the engine does not load them."""
    refusal: str = ""
    """Why the engine does not load such modules."""


class StoredRules(msgspec.Struct, frozen=True):
    """What a `quantization_config` says. Weights to which no rule applies are in the checkpoint's dtype."""

    rules: tuple[PackingRule, ...] = ()
    excluded: tuple[str, ...] = ()
    """Patterns of modules that are not quantized."""
    method: str = ""
    """The `quant_method`; empty: nothing is quantized."""
    summary: str = ""
    """The method and its main numbers, for people."""
    unused: tuple[str, ...] = ()
    """Keys that ask for more than weights, and have no effect."""

    @property
    def is_packed(self) -> bool:
        """Whether weights are quantized."""
        return bool(self.rules)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts of all rules."""
        return tuple(layout for rule in self.rules for layout in rule.layouts)

    def __str__(self) -> str:
        return self.summary

    @property
    def label(self) -> str:
        """The name of the first packing; empty: nothing is packed."""
        return self.rules[0].packing.label if self.rules else ""


def label_of(kind: str, bits: int) -> str:
    """The label of elements of `bits`: "fp" and the bits for kind "float", else "int" and the bits."""
    return f"fp{bits}" if kind == "float" else f"int{bits}"


class ModulePatterns:
    """Patterns of module names: the name or the last part of it, a parent, a glob, or "re:" and a regex."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._regexes = [re.compile(pattern[3:]) for pattern in patterns if pattern.startswith("re:")]
        plain = {_plain(pattern) for pattern in patterns if not pattern.startswith("re:")}
        self._names = frozenset(plain)
        globs = (glob for pattern in sorted(plain) if "*" in pattern for glob in (pattern, f"{pattern}.*"))
        self._globs = [re.compile(fnmatch.translate(glob)) for glob in globs]

    def match(self, module: str) -> bool:
        """Whether one of the patterns means the module."""
        # Only names are looked up: a checkpoint may have thousands of modules and hundreds of patterns.
        plain = _plain(module)
        if plain.rpartition(".")[2] in self._names or plain in self._names:
            return True
        stop = plain.rfind(".")
        while stop > 0:
            if plain[:stop] in self._names:
                return True
            stop = plain.rfind(".", 0, stop)
        if any(glob.match(plain) for glob in self._globs):
            return True
        # The modules of a language model have longer names in a wrapper of it.
        names = (module, *(f"{prefix}{plain}" for prefix in _WRAPPERS)) if self._regexes else ()
        return any(regex.match(name) for regex in self._regexes for name in names)


class RuleBook:
    """Finds the rule for a module of the checkpoint."""

    def __init__(self, rules: StoredRules) -> None:
        self._excluded = ModulePatterns(rules.excluded)
        # A rule that names modules goes before one for all linear layers.
        ordered = sorted(rules.rules, key=lambda rule: "Linear" in rule.targets)
        self._rules = [(rule, ModulePatterns(rule.targets), "Linear" in rule.targets) for rule in ordered]

    def find(self, module: str, is_expert: bool) -> PackingRule | None:
        """The rule for a module; None: it is not quantized."""
        if self._excluded.match(module):
            return None
        for rule, patterns, is_general in self._rules:
            if (is_expert or not rule.only_experts) and (is_general or patterns.match(module)):
                return rule
        return None


def _plain(name: str) -> str:
    """The name without the prefix of a model that is part of a larger one."""
    return name.replace("model.language_model.", "model.").replace("language_model.", "")


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """The bytes of a checkpoint's tensors. Equal only to itself, so that results can be kept for it."""

    rules: StoredRules
    dtype: DType
    """Type of weights that are not packed."""
    module: Callable[[str], str]
    """The checkpoint's name for the module of a canonical parameter."""
    _numbered: dict[int, frozenset[str]] = field(default_factory=dict, init=False)
    _packings: dict[str, Packing | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        found: dict[int, set[str]] = {}
        for pattern in self.rules.excluded:
            if match := _NUMBERED_LAYER.search(pattern):
                found.setdefault(int(match.group(1)), set()).add(_NUMBERED_LAYER.sub("layers.*", pattern))
        self._numbered.update({index: frozenset(patterns) for index, patterns in found.items()})

    def layer_class(self, index: int) -> Hashable:
        """Equal for layers that the rules treat alike."""
        return self._numbered.get(index)

    def packing(self, name: str) -> Packing | None:
        """How the canonical parameter `name` is packed; None: it is in the checkpoint's dtype."""
        # The planner asks for the same names with every layout, and a look-up takes time in each of many patterns.
        if name not in self._packings:
            self._packings[name] = self._find_packing(name)
        return self._packings[name]

    def _find_packing(self, name: str) -> Packing | None:
        layer, part, kind = parse_name(name)
        if layer is None or kind != "weight" or not (is_linear(name) or part == "attention.kv_up"):
            return None
        rule = self._find_rule(name)
        return None if rule is None else rule.packing

    def form(self, name: str) -> Form | None:
        """What the canonical parameter `name` needs if it stays packed; None: it is not quantized, or not loaded."""
        if self.packing(name) is None:
            return None
        rule = self._find_rule(name)
        return rule.layouts[0].form if rule is not None and rule.layouts else None

    def _find_rule(self, name: str) -> PackingRule | None:
        return self._rule_book.find(self.module(name), parse_name(name).part.startswith("feed_forward.experts."))

    @functools.cached_property
    def _rule_book(self) -> RuleBook:
        return RuleBook(self.rules)

    def num_bytes(self, name: str, shape: Shape) -> int:
        """Bytes of the part `shape` of the canonical parameter `name`."""
        packing = self.packing(name) if len(shape) == 2 else None
        if packing is not None:
            return packing.num_bytes(shape[0], shape[1])
        return math.prod(shape) * DTYPE_BYTES["float32" if is_kept_in_float32(name) else self.dtype]
