"""Which modules of a model adapters may change, by the names that checkpoints have for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from shardline.checkpoints.lookup import family
from shardline.models.adapters import EMBEDDING, LM_HEAD, is_adaptable, is_of_expert
from shardline.models.llama_like import StackedExperts
from shardline.models.parameters import counted_parameters, expert_of, kind_of, parse_name
from shardline.models.partition import Span
from shardline.models.spec import DecoderSpec

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of vLLM for several modules that it multiplies at once."""


@functools.lru_cache(maxsize=64)
def chosen_kinds(spec: DecoderSpec, targets: tuple[str, ...] = ()) -> frozenset[str]:
    """The kinds (`kind_of`) of the parameters that adapters may change, if they may change the modules whose names end
    with one of `targets` only. None of them: all that can be changed.

    Raises:
        ValueError: the model has no module of such a name.
    """
    names = _module_names(spec)
    if not targets:
        return frozenset(names)
    chosen: set[str] = set()
    for target in targets:
        before, dot, last = target.rpartition(".")
        ends = (target, *(f"{before}{dot}{one}" for one in _FUSED.get(last, ())))
        found = {kind for kind, modules in names.items() if any(_ends(module, ends) for module in modules)}
        if not found:
            modules = {module.rpartition(".")[2] for own in names.values() for module in own}
            there = sorted(modules | {"experts" for kind in names if is_of_expert(kind)})
            raise ValueError(
                f"lora_target_modules names {target[:200]!r}, and {spec.model_type} has no such modules that adapters "
                f"can change, whatever their layer; it has {', '.join(there)}"
            )
        chosen |= found
    return frozenset(chosen)


def target_of(spec: DecoderSpec, kind: str) -> str:
    """The end of a name by which `targets` may choose the parameters of a kind."""
    return _module_names(spec)[kind][0].rpartition(".")[2]


def _ends(module: str, ends: tuple[str, ...]) -> bool:
    return any(module == end or module.endswith(f".{end}") for end in ends)


@functools.lru_cache(maxsize=64)
def _module_names(spec: DecoderSpec) -> dict[str, list[str]]:
    """The names, without numbers, of the modules that are or have the parameters of each kind that can be changed."""
    names: dict[str, list[str]] = {}
    for name in _examples(spec):
        source = family(spec.model_type).tensor_source(name, spec)
        keys = [key.removesuffix(".weight") for key in (source.key, *source.aliases)]
        if expert_of(parse_name(name).part) is not None:
            stacked = StackedExperts("mlp.experts").find(name, spec)
            assert stacked is not None
            keys = [*keys, stacked.key, *(f"{key.partition('.experts.')[0]}.experts" for key in keys)]
        own = names.setdefault(kind_of(name), [])
        own += [".".join(word for word in key.split(".") if not word.isdecimal()) for key in keys]
    return names


def _examples(spec: DecoderSpec) -> Iterator[str]:
    """A parameter of each kind of each kind of layer."""
    yield EMBEDDING
    for one in counted_parameters(spec, Span(0, len(spec.layers))):
        if one.name.endswith(".weight") and is_adaptable(one.name):
            yield one.name
    if spec.num_labels is None:
        yield LM_HEAD
