"""Names of GGUF files: their parts and quants, and the choice among several."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

SUFFIX = ".gguf"

_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[0-9A-Z]+)*|TQ\d_\d|(?:MX|NV)FP4(?:_MOE)?|BF16|FP?16|FP?32))$", re.IGNORECASE
)
_NO_MODEL = re.compile(r"(?:^|[-._])(?:mmproj|imatrix)(?:[-._]|$)|^\.", re.IGNORECASE)
"""Names of image encoders, of importance matrices, and of what some systems store beside a file ("._x.gguf")."""
_PIECE = re.compile(r"(.*\.gguf)[-.](?:part\d+of\d+|split-[a-z]+)$", re.IGNORECASE)
"""Names of pieces of a file that was cut anywhere, which is no GGUF file before they are joined."""


def is_gguf(model: str | Path) -> bool:
    """Whether the name is that of a GGUF file."""
    return str(model).lower().endswith(SUFFIX)


def split_quant(model: str) -> tuple[str, str | None]:
    """A model and its quant: "team/model:Q4_K_M" is ("team/model", "Q4_K_M"); without a colon there is none."""
    name, colon, quant = model.rpartition(":")
    if not colon or name in ("", "package") or not quant or "/" in quant or "\\" in quant:
        return model, None
    return name, quant


def quant_of(name: str) -> str:
    """The quant that a file's name ends in, in capitals, or else the name without part and suffix."""
    stem = _stem(name)
    found = _QUANT.search(stem)
    return found.group(1).upper() if found else stem


def model_names(names: Iterable[str]) -> list[str]:
    """Those of `names` that are GGUF files with a language model, sorted."""
    return sorted(name for name in names if is_gguf(name) and not _NO_MODEL.search(PurePosixPath(name).name))


def choose_files(names: Iterable[str], quant: str | None, model: str) -> list[str]:
    """The files of one quant, in order, of all files of `model`, a folder or a repository.

    Raises:
        ValueError: there is none, or the choice is open. The message lists what is there.
    """
    names = sorted(names)
    found = model_names(names)
    groups: dict[str, list[str]] = {}
    for name in found:
        groups.setdefault(quant_of(name), []).append(name)
    listed = ", ".join(sorted(groups))
    if not groups:
        raise ValueError(f"model {model!r} has no GGUF files with a language model{_hint(names)}")
    if quant is None:
        if len(groups) > 1:
            raise ValueError(
                f"model {model!r} has several quants: {listed}; name one, for example {model}:{_usual(groups)}"
            )
        (chosen,) = groups
    else:
        asked = quant.upper()
        matching = [label for label in groups if label.upper() == asked]
        matching = matching or [label for label in groups if label.upper() == f"UD-{asked}"]
        if not matching:
            raise ValueError(f"model {model!r} has no quant {quant}; it has {listed}{_hint(names)}")
        chosen = matching[0]
    files = groups[chosen]
    if len({_stem(name) for name in files}) > 1:
        raise ValueError(
            f"model {model!r} has several files of quant {chosen}: {', '.join(files)}; download one, and give its path"
        )
    return files


def all_parts(file: Path) -> tuple[Path, ...]:
    """All files of the model of which `file` is a part, in order. Most models are one file.

    Raises:
        ValueError: parts are missing.
    """
    found = _PART.search(file.stem)
    if found is None:
        return (file,)
    base, count = file.stem[: found.start()], int(found.group(2))
    if not 1 <= int(found.group(1)) <= count <= 9999:
        raise ValueError(f"{file} has a name of an impossible part; restore the name under which it was published")
    parts = tuple(file.with_name(f"{base}-{i:05}-of-{count:05}{file.suffix}") for i in range(1, count + 1))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ValueError(f"{file.parent} lacks {len(missing)} of {count} parts of a model: {named}; download it again")
    return parts


def _stem(name: str) -> str:
    """The name of the file without folder, suffix and part."""
    return _PART.sub("", PurePosixPath(name).name[: -len(SUFFIX)])


def _hint(names: Iterable[str]) -> str:
    """What to do if the wanted file is not among `names`; empty: nothing known."""
    names = list(names)
    if whole := sorted({found.group(1) for name in names if (found := _PIECE.match(name))}):
        return f"; join the pieces of {', '.join(whole[:3])} first, in order (cat)"
    if not model_names(names) and any(name.endswith(".safetensors") for name in names):
        return "; it has safetensors: leave out the quant, and --load-format gguf"
    return ""


def _usual(groups: Iterable[str]) -> str:
    usual = ("Q4_K_M", "Q8_0", "Q4_0")
    labels = sorted(groups)
    return next((label for label in usual if label in labels), labels[0])
