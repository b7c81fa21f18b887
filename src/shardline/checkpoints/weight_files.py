"""Which files of a folder hold a checkpoint in safetensors, and what a file is that holds something else."""

from __future__ import annotations

import re
from pathlib import Path

from shardline.checkpoints.folder_files import read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_OTHER_SUFFIXES = (".bin", _SUFFIX, ".gguf", ".pth", ".pt", ".incomplete")
_NAMED = 5
_REASONS = {
    "consolidated": "this is Mistral's own format: download the files of the same repository with config.json's names",
    "adapter_": "this is an adapter (LoRA): merge it into its model (in peft: merge_and_unload), and save that",
    ".incomplete": "a download was not finished: run it again",
    ".gguf": "give the GGUF file itself, or leave --load-format out",
}
"""What to do about files that are no checkpoint, by a part of their names."""
_CONVERT = (
    "convert the weights to safetensors (in transformers: model.save_pretrained(folder)), or use load_format dummy"
)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint: model.safetensors, or those that an index names, or those that are there.

    Raises:
        ValueError: there are no files, the index is corrupt, files that it names or parts are missing, or files with
            different names may be different checkpoints.
    """
    if (single := folder / _SINGLE).is_file():
        return (single,)
    # Some tools name the index like their files.
    indices = [folder / _INDEX] if (folder / _INDEX).is_file() else sorted(folder.glob(f"*{_SUFFIX}.index.json"))
    return _files_of(indices[0]) if indices else _files_in(folder)


def _files_of(index: Path) -> tuple[Path, ...]:
    """The files that an index names."""
    folder = index.parent
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        files = tuple(folder / name for name in names)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is corrupt: it must be an object with a weight_map of key to file name") from None
    outside = [name for name in names if Path(name).name != name]
    if outside or not files:
        raise ValueError(f"{index} is corrupt: its weight_map must name files beside it, got {outside or 'none'}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files: {_listed(missing)}; download it again"
        )
    return files


def _files_in(folder: Path) -> tuple[Path, ...]:
    """The files of the one checkpoint in a folder without an index."""
    found = [file for file in sorted(folder.glob(f"*{_SUFFIX}")) if not file.name.startswith((".", *_REASONS))]
    names = [file.name for file in found]
    if not found:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _OTHER_SUFFIXES)
        reason = next((why for part, why in _REASONS.items() if any(part in name for name in others)), _CONVERT)
        raise ValueError(
            f"{folder} has neither {_SINGLE} nor {_INDEX} "
            f"({f'found only {_listed(others)}' if others else 'found no weights at all'}); {reason}"
        )
    parts = [_PART.search(file.stem) for file in found]
    first = parts[0]
    if first is None and len(found) == 1:
        return tuple(found)
    if first is None or len({part and (part.string[: part.start()], part[2]) for part in parts}) > 1:
        raise ValueError(
            f"{folder} has {_listed(names)}, and no {_INDEX} says which of them are the model; download the index, or "
            "keep the files of one model"
        )
    count = int(first[2])
    there = {int(part[1]) for part in parts if part is not None}
    missing = [number for number in range(1, min(count, 100_000) + 1) if number not in there]
    if missing:
        wanted = [f"{first.string[: first.start()]}-{number:05}-of-{count:05}{_SUFFIX}" for number in missing]
        raise ValueError(f"{folder} lacks {len(missing)} of {count} weight files: {_listed(wanted)}; download it again")
    return tuple(found)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
