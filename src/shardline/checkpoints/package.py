"""Models inside installed Python packages: "package:NAME", or "package:NAME:QUANT" for one GGUF quant of several."""

from __future__ import annotations

import importlib.machinery
import re
from collections.abc import Iterator
from pathlib import Path

from shardline.checkpoints.gguf.names import model_names, split_quant

PREFIX = "package:"

_LISTED = 6
"""So many entries of a package without a model are named."""


def package_folder(model: str) -> Path | None:
    """The folder with the model of a package; None: `model` names no package. None of the package's code runs.

    Raises:
        ValueError: there is no such package, or it has no model or several. The message says what is there.
    """
    if not model.startswith(PREFIX):
        return None
    # Names of distributions have hyphens where those of packages have underscores.
    name = _package_name(model).replace("-", "_")
    folders = _locations(name)
    if not folders:
        distribution = name.partition(".")[0].replace("_", "-")
        raise ValueError(f"model {model!r}: no package {name!r} is installed here; try `pip install {distribution}`")
    found = [folder for package in folders for folder in _with_models(package)]
    if len(found) > 1:
        raise ValueError(
            f"model {model!r}: the package has {len(found)} models; give one: {', '.join(map(str, found))}"
        )
    if not found:
        entries = sorted(path.name for folder in folders for path in folder.glob("*") if path.name[:2] != "__")
        listed = ", ".join(entries[:_LISTED]) + (", ..." if len(entries) > _LISTED else "")
        raise ValueError(
            f"model {model!r}: {folders[0]} has no GGUF file, and no config.json beside safetensors; "
            f"it has {listed or 'only code'}"
        )
    return found[0]


def usual_names(model: str) -> tuple[str, ...]:
    """The names under which `model`, as a user gives it, is served; the first one is for answers.

    A local path is also its last part. Packages of models are plug-ins of a program, "llm", which begins their names.
    """
    if model.startswith(PREFIX):
        name = _package_name(model)
        names = [re.sub("^llm[_-]", "", name), name, model]
    elif (path := Path(model).expanduser()).is_file():
        names = [model, path.name, path.stem]
    elif model != "demo" and Path(split_quant(str(path))[0]).is_dir():
        names = [model, path.absolute().name]
    else:
        names = [model]
    return tuple(dict.fromkeys(filter(None, names)))


def _package_name(model: str) -> str:
    return model.removeprefix(PREFIX).partition(":")[0].strip()


def _locations(name: str) -> list[Path]:
    """The folders of a package; empty: there is none. `importlib.resources` would import what is above it."""
    path: list[str] | None = None
    for end in range(1, name.count(".") + 2):
        spec = importlib.machinery.PathFinder.find_spec(".".join(name.split(".")[:end]), path)
        if spec is None or spec.submodule_search_locations is None:
            return []
        path = list(spec.submodule_search_locations)
    return [Path(folder) for folder in path or () if Path(folder).is_dir()]


def _with_models(package: Path) -> Iterator[Path]:
    """The folders of a package that have a model's files."""
    for pattern in ("", "*/", "*/*/"):
        for folder in sorted(package.glob(pattern) if pattern else (package,)):
            is_checkpoint = (folder / "config.json").is_file() and any(folder.glob("*.safetensors*"))
            if is_checkpoint or model_names(path.name for path in folder.glob("*.gguf")):
                yield folder
