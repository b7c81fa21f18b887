"""Find a model to plan for: shipped facts (`models.json`), a folder, or config.json of the hub. No weights are read."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_struct

from shardline.checkpoints.checkpoint import read_header
from shardline.checkpoints.description import ModelDescription
from shardline.checkpoints.gguf.names import is_gguf, split_quant
from shardline.checkpoints.heads import check_whole, flatten_head
from shardline.checkpoints.hub import DEMO_FOLDER, ModelFiles, find_local_model, resolve_model
from shardline.checkpoints.package import package_folder
from shardline.checkpoints.quantization import read_stored, usual_rules, with_quantization
from shardline.models.hf_config import HFConfig
from shardline.models.stored_weights import StoredRules
from shardline.planner.planned_model import PlannedModel, read_planned, read_planned_gguf

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's answer."""


@functools.cache
def shipped_facts() -> dict[str, Any]:
    """{"models": {hub id: {"source", "config"}}, "aliases": {hub id: {"of": hub id, "stored": label}}}."""
    facts: dict[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    return facts


def find_model(name: str, revision: str | None = None) -> PlannedModel:
    """The model that a user names: a folder with config.json, a GGUF file, a package, a known hub id, or any other.

    As for `shardline serve`, a GGUF file may also be named as FOLDER, FOLDER:QUANT or, once it has been downloaded,
    REPOSITORY:QUANT.

    Raises:
        ValueError: it cannot be found, its configuration is wrong, or its type has no spec.
    """
    folder = own_folder(name) or Path(name).expanduser()
    if (file := _find_gguf(name, folder, revision)) is not None:
        return read_planned_gguf(replace(resolve_model(str(file)), name=name))
    if (folder / _CONFIG).is_file():
        own, weights = with_quantization(_read(folder / _CONFIG), folder), folder / _WEIGHTS
        might_be_head = own.get("num_hidden_layers") == 1 and weights.is_file()
        return _read_whole(name, own, read_header(weights) if might_be_head else ())
    if folder.is_dir():
        raise ValueError(f"model {name!r}: the folder has no {_CONFIG}")
    if name.startswith((".", "/", "~")):
        raise ValueError(f"model {name!r}: there is no such folder; give a folder with {_CONFIG}, or a hub id")
    if revision not in (None, "main"):
        return _read_whole(name, _download(name, revision))
    facts = shipped_facts()
    aliases = {key.lower(): value for key, value in facts["aliases"].items()}
    alias = aliases.get(name.lower(), {"of": name})
    known = {key.lower(): value["config"] for key, value in facts["models"].items()}
    config = known.get(alias["of"].lower())
    if config is None:
        return _read_whole(name, _download(name, revision))
    model = read_planned(name, config)
    if "stored" in alias:
        return stored_as(model, usual_rules()[alias["stored"]])
    return model


def _read_whole(name: str, config: dict[str, Any], tensors: Collection[str] = ()) -> PlannedModel:
    """As `read_planned`; refuses heads. `tensors`: the keys of its checkpoint, if they are known."""
    try:
        check_whole(flatten_head(config), tensors)
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from None
    return read_planned(name, config)


def own_folder(name: str) -> Path | None:
    """The folder of a model whose name only this engine knows: "demo", or "package:..."; None: it is another name.

    Raises:
        ValueError: there is no such package, or it has no model.
    """
    return DEMO_FOLDER if name == "demo" else package_folder(name)


def _find_gguf(name: str, folder: Path, revision: str | None) -> Path | None:
    """The GGUF file that a user names; None: the name means something else.

    Raises:
        ValueError: there is no such file or quant, or it has not been downloaded.
    """
    quant = None if folder.is_dir() else split_quant(name)[1]
    if not (is_gguf(name) or quant is not None or folder.is_dir()):
        return None
    local = find_local_model(name, revision)
    if local is None and quant is not None:
        raise ValueError(f"model {name!r} is not on this host, and a plan needs the header: shardline download {name}")
    return local if local is not None and is_gguf(local) else None


def stored_as(model: PlannedModel, rules: StoredRules) -> PlannedModel:
    """The same model in a checkpoint that is stored by `rules`, of whose tensors `resolve` knows nothing."""
    spec = replace_struct(model.spec, dtype="bfloat16")
    unknown = f"how this {rules.label} checkpoint is stored is not among the shipped facts"
    refusal = model.engine_refusal or f"{unknown}; a folder with its config.json plans this engine too"
    return PlannedModel(model.name, model.config, spec, rules, model.other_parameters, refusal)


@functools.lru_cache(maxsize=64)
def describe(model: PlannedModel, *, checked: bool = True) -> ModelDescription:
    """The model as `resolve` reads it, without files. If it is not `checked`, `resolve` will, for the devices it finds.

    Raises:
        ValueError: this engine cannot load it.
    """
    if model.engine_refusal and checked:
        raise ValueError(model.engine_refusal)
    if model.files is not None:
        return ModelDescription(model.files, read_stored(HFConfig(model.config)), model.checkpoint)
    files = ModelFiles(model.name, Path(model.name), dict(model.config), {}, ())
    return ModelDescription(files, read_stored(HFConfig(model.config)), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object")
    return config


def _download(name: str, revision: str | None) -> dict[str, Any]:
    """config.json of a hub repository, and nothing else.

    Raises:
        ValueError: it is neither in the cache nor can it be fetched.
    """
    import huggingface_hub

    def fetch(local_files_only: bool) -> dict[str, Any]:
        path = huggingface_hub.hf_hub_download(
            name, _CONFIG, revision=revision, etag_timeout=_HUB_TIMEOUT, local_files_only=local_files_only
        )
        return _read(Path(path))

    # The transport's errors differ between versions of huggingface_hub. All of them are explained to the user.
    try:
        # Without this request, which has a time-out, a download is tried again and again for half a minute.
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT)
        return fetch(local_files_only=False)
    except Exception as error:
        try:
            return fetch(local_files_only=True)
        except Exception:
            where = "is neither a folder nor" if revision is None else f"with --revision {revision} is not"
            raise ValueError(
                f"model {name!r} {where} among the shipped facts, and {_CONFIG} of the hub repository {name} cannot "
                f"be fetched ({type(error).__name__}); {_likely(name)}give a folder that has this file"
            ) from None


def _likely(name: str) -> str:
    """The known models whose names are nearly this one, as a question; empty: there are none."""
    known = {known.lower(): known for kind in ("models", "aliases") for known in shipped_facts()[kind]}
    close = [known[match] for match in difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.85)]
    return f"did you mean {' or '.join(close)}? Or " if close else ""
