"""Find the files of a model that the user names: 'demo', a folder, a package, or a hub id. No torch is needed."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardline.checkpoints.folder_files import read_json, read_token_ids, require_regular_files, weight_files
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.config import read_config
from shardline.checkpoints.gguf.names import all_parts, choose_files, is_gguf, model_names, split_quant
from shardline.checkpoints.heads import flatten_head
from shardline.checkpoints.lookup import family, language_model_type
from shardline.checkpoints.package import package_folder
from shardline.checkpoints.quantization import BESIDE, with_quantization
from shardline.checkpoints.wrapper import text_config
from shardline.config.engine import USUAL_ACCESS, HubAccess

DEMO_FOLDER = Path(__file__).parents[1] / "demo_model"
"""The model "demo", which ships with the package; in `draft` and `eagle` are a model and a head that draft for it,
"demo-draft" and "demo-eagle"."""

_HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""
_TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)
_CONFIG_PATTERNS = ("config.json", "generation_config.json", *BESIDE, *_TOKENIZER_PATTERNS)
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
_READ_PATTERNS = (*_CONFIG_PATTERNS, *_WEIGHT_PATTERNS, "*.gguf")
# Subfolders and "consolidated" files repeat the same weights under other names.
_IGNORED_PATTERNS = ("*/*", "consolidated*", "*.bin", "*.pth", "*.gguf")


class HubUnreachable(ValueError):
    """The hub cannot be reached or is in trouble, and the model is not in the cache. Another try may succeed."""


@dataclass(frozen=True)
class ModelFiles:
    """A model's files on this host."""

    name: str
    """What the user asked for."""
    folder: Path
    config: dict[str, Any]
    """config.json, parsed."""
    generation_config: dict[str, Any]
    """generation_config.json, parsed; empty if there is no such file."""
    weight_files: tuple[Path, ...]
    """The safetensors or GGUF files; empty if they were not requested."""
    gguf: Path | None = None
    """The GGUF file, or its first part; None: the model is a folder in Hugging Face format."""

    @property
    def location(self) -> Path:
        """What names the model on this host: its GGUF file, or else its folder."""
        return self.gguf or self.folder

    @property
    def text_source(self) -> Path:
        """Where the tokenizer is: in the folder, or in the GGUF file if there is none beside it."""
        has_tokenizer = self.gguf is None or (self.folder / "tokenizer.json").is_file()
        return self.folder if has_tokenizer else self.location

    @property
    def model_type(self) -> str:
        """The configuration's `model_type`."""
        return str(self.config["model_type"])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence, from generation_config.json, else from config.json."""
        of_config = self.config.get("eos_token_id", text_config(self.config).get("eos_token_id"))
        return read_token_ids(self.generation_config.get("eos_token_id", of_config), self.location)


def resolve_model(
    model: str,
    revision: str | None = None,
    weights: bool = True,
    load_format: str = "auto",
    *,
    hub: HubAccess = USUAL_ACCESS,
    overrides: Mapping[str, Any] | None = None,
    generation_config: str = "auto",
) -> ModelFiles:
    """The files of `model`: 'demo', a folder in Hugging Face format, a GGUF file, "package:NAME" (a model inside an
    installed package), or a hub id, which is downloaded if necessary. "NAME:QUANT" is one GGUF quant of several.

    With `weights` False, safetensors files are neither searched nor downloaded. HF_TOKEN, HF_HOME and HF_HUB_OFFLINE
    have their usual meaning. `overrides`: values that replace those of config.json, in nested objects too.
    `generation_config`: the folder of another generation_config.json; auto, vllm: the model's own.

    Raises:
        ValueError: there is no such model, it cannot be reached, its configuration is broken, its model_type is not
            supported, it has no weights that can be loaded, or several quants. The message says what would work.
    """
    files = _find_files(model, revision, weights, load_format, hub)
    if overrides:
        files = replace(files, config=with_overrides(files.config, overrides))
    if generation_config not in ("auto", "vllm"):
        found = _read_generation_config(Path(generation_config).expanduser())
        if not found:
            raise ValueError(
                f"--generation-config {generation_config} must be a folder with a generation_config.json, auto or vllm"
            )
        files = replace(files, generation_config=found)
    return files


def _find_files(model: str, revision: str | None, weights: bool, load_format: str, hub: HubAccess) -> ModelFiles:
    """See `resolve_model`."""
    path = Path(model).expanduser()
    if is_gguf(model):
        return _gguf_files(model, path, load_format)
    name, quant = (model, None) if path.is_dir() else split_quant(model)
    local = _local_folder(name)
    if local is not None:
        require_regular_files(local, _READ_PATTERNS)
    if quant is not None or load_format == "gguf":
        return _gguf_files(model, _choose_gguf(name, local, quant, revision, load_format, hub), load_format)
    if local is not None and weights and not _has_safetensors(local) and model_names(_names_in(local)):
        return _gguf_files(model, _choose_gguf(name, local, None, revision, load_format, hub), load_format)
    folder = local if local is not None else _download(model, revision, _CONFIG_PATTERNS, hub=hub)
    if not (folder / "config.json").is_file():
        if load_format != "safetensors" and model_names(_names_of(name, local, revision, hub)):
            return _gguf_files(model, _choose_gguf(name, local, None, revision, load_format, hub), load_format)
        below = _model_below(folder)
        raise ValueError(
            f"model {model!r}: {folder} has no config.json, so it is no model in Hugging Face format{below}"
        )
    config = flatten_head(with_quantization(read_json(folder / "config.json"), folder))
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"model {model!r}: {folder / 'config.json'} has no model_type")
    # Refuse an unknown type before the weights are downloaded.
    family(language_model_type(config))
    files: Sequence[Path] = ()
    if weights:
        if local is None:
            # The folder of a snapshot has its commit as its name. The branch may have moved in the meantime.
            folder = _download(model, folder.name, (*_CONFIG_PATTERNS, *_WEIGHT_PATTERNS), hub=hub)
            if not _has_safetensors(folder) and model_names(_names_of(name, local, revision, hub)):
                return _gguf_files(model, _choose_gguf(name, local, None, revision, load_format, hub), load_format)
        files = weight_files(folder)
    return ModelFiles(
        name=model,
        folder=folder,
        config=config,
        generation_config=_read_generation_config(folder),
        weight_files=tuple(files),
    )


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with other values; an object replaces only the values that it has."""
    merged = dict(config)
    for key, value in overrides.items():
        inner = merged.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = with_overrides(inner, value)
        merged[key] = value
    return merged


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """The generation_config.json of a folder; empty if it has none."""
    file = folder / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _model_below(folder: Path) -> str:
    """Which folder in `folder` to give instead; empty: none has a model."""
    # The hub's cache has a folder for each commit.
    found = next((file for glob in ("*", "snapshots/*") for file in sorted(folder.glob(f"{glob}/config.json"))), None)
    return "" if found is None else f"; did you mean {found.parent}?"


def _gguf_files(model: str, file: Path, load_format: str) -> ModelFiles:
    """The files of a model in GGUF: `file`, and its other parts.

    Raises:
        ValueError: the file is missing or broken, or its architecture is not supported.
    """
    _check_gguf_asked(model, load_format)
    if not file.is_file():
        raise ValueError(f"model {model!r}: there is no such file")
    first = all_parts(file.absolute())[0]
    checkpoint = GGUFCheckpoint.open(first)
    beside = first.parent / "config.json"
    config = read_config(checkpoint, read_json(beside) if beside.is_file() else None)
    family(str(config["model_type"]))
    return ModelFiles(
        name=model,
        folder=first.parent,
        config=config,
        generation_config=_read_generation_config(first.parent),
        weight_files=checkpoint.files,
        gguf=first,
    )


def _check_gguf_asked(model: str, load_format: str) -> None:
    if load_format == "safetensors":
        raise ValueError(f"load_format is safetensors, and {model!r} is a GGUF file; leave the flag out")


def _choose_gguf(
    name: str, local: Path | None, quant: str | None, revision: str | None, load_format: str, hub: HubAccess
) -> Path:
    """The first file of a quant in a folder, or in a hub repository, from which it is downloaded.

    Raises:
        ValueError: `load_format` is another format, or see `choose_files` and `_download`.
    """
    _check_gguf_asked(name, load_format)
    names = _names_of(name, local, revision, hub)
    chosen = choose_files(names, quant, name)
    if local is None:
        # The other files of the repository may be larger than any disk.
        text = [one for one in names if "/" not in one and any(fnmatch.fnmatch(one, p) for p in _CONFIG_PATTERNS)]
        local = _download(name, revision, [glob.escape(one) for one in (*text, *chosen)], (), hub)
    return local / chosen[0]


def _names_of(name: str, local: Path | None, revision: str | None, hub: HubAccess) -> list[str]:
    """The names of all files in a folder, or else in a hub repository. Without the hub, those in its cache."""
    if local is not None:
        return _names_in(local)
    import huggingface_hub

    with contextlib.suppress(Exception):
        api = huggingface_hub.HfApi(token=hub.token)
        siblings = api.model_info(name, revision=revision, timeout=_HUB_TIMEOUT).siblings
        return [sibling.rfilename for sibling in siblings or ()]
    return _names_in(_download(name, revision, _CONFIG_PATTERNS, hub=hub))


def _names_in(folder: Path) -> list[str]:
    """The names of the files in a folder and in its folders."""
    return sorted(str(path.relative_to(folder)) for pattern in ("*", "*/*") for path in folder.glob(pattern))


def _has_safetensors(folder: Path) -> bool:
    return next(folder.glob("*.safetensors*"), None) is not None


def resolve_tokenizer(tokenizer: str, revision: str | None = None, hub: HubAccess = USUAL_ACCESS) -> Path:
    """The folder or the GGUF file of a tokenizer that does not come with its model.

    `tokenizer` is a local folder, a GGUF file, "package:NAME" or a hub id.

    Raises:
        ValueError: there is no such folder or repository, or it cannot be reached.
    """
    if is_gguf(tokenizer) and Path(tokenizer).expanduser().is_file():
        return Path(tokenizer).expanduser().absolute()
    name, quant = (tokenizer, None) if Path(tokenizer).expanduser().is_dir() else split_quant(tokenizer)
    folder = _local_folder(name) or _download(tokenizer, revision, _TOKENIZER_PATTERNS, hub=hub)
    require_regular_files(folder, _READ_PATTERNS)
    if not (folder / "tokenizer.json").is_file() and model_names(names := _names_in(folder)):
        return folder / choose_files(names, quant, name)[0]
    return folder


def _local_folder(model: str) -> Path | None:
    """The folder that `model` names, or None if it can only be a hub id.

    Raises:
        ValueError: it is neither a folder nor a possible hub id.
    """
    if model in ("demo", "demo-draft", "demo-eagle"):
        return DEMO_FOLDER / model.removeprefix("demo").removeprefix("-")
    if (package := package_folder(model)) is not None:
        return package
    path = Path(model).expanduser()
    if path.is_dir() and model.strip():
        # Absolute, so that a folder called demo is never taken for the embedded model.
        return path.absolute()
    if path.is_file():
        raise ValueError(
            f"model {model!r} is a file; give a GGUF file, the folder that has its config.json and *.safetensors, or a "
            "hub id"
        )
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or not model.strip():
        raise ValueError(
            f"model {model!r}: there is no such folder; give a folder with config.json and *.safetensors, a hub id "
            "like Qwen/Qwen3-0.6B, or 'demo' for the embedded demo model"
        )
    return None


def _download(
    model: str,
    revision: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = _IGNORED_PATTERNS,
    hub: HubAccess = USUAL_ACCESS,
) -> Path:
    """Download the files of a hub repository that match `patterns` and none of `ignored`, unless the cache has them;
    returns their folder.

    A file is downloaded by one process at a time. The others wait, and then find it in the cache.

    Raises:
        ValueError: see `_explain`.
    """
    import huggingface_hub
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils._validators import validate_repo_id

    def snapshot(local_files_only: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            etag_timeout=_HUB_TIMEOUT,
            local_files_only=local_files_only,
            token=hub.token,
            cache_dir=hub.folder,
        )
        return Path(folder)

    try:
        validate_repo_id(model)
    except HFValidationError:
        raise ValueError(
            f"model {model!r} is neither an existing folder nor a hub id like Qwen/Qwen3-0.6B; "
            "'demo' names the embedded demo model"
        ) from None
    # The transport's errors differ between versions of huggingface_hub. All of them are explained to the user.
    is_under_way = False
    try:
        # snapshot_download makes the same request, but some versions make it without a time-out.
        huggingface_hub.HfApi(token=hub.token).model_info(model, revision=revision, timeout=_HUB_TIMEOUT)
        is_under_way = not ignored or set(_WEIGHT_PATTERNS) <= set(patterns)
        return snapshot(local_files_only=False)
    except RevisionNotFoundError as error:
        raise ValueError(_explain(model, revision, error, hub)) from None
    except Exception as error:
        # After a failure in the middle, the cache may have only a part of the weights.
        with contextlib.suppress(Exception):
            if not is_under_way:
                return snapshot(local_files_only=True)
        kind = ValueError if isinstance(error, (RepositoryNotFoundError, OfflineModeIsEnabled)) else HubUnreachable
        raise kind(_explain(model, revision, error, hub)) from error


def fetch_files(repository: str, names: Sequence[str], hub: HubAccess = USUAL_ACCESS) -> Path:
    """The folder with files of a hub repository, which are downloaded unless the cache has them.

    Raises:
        ValueError: see `_explain`.
    """
    return _download(repository, None, names, hub=hub)


def find_local_model(model: str, revision: str | None = None, hub: HubAccess = USUAL_ACCESS) -> Path | None:
    """The folder or the GGUF file of a model that is on this host, without a look at the hub; None: it must be
    downloaded first.

    Raises:
        ValueError: `model` is neither a folder nor a GGUF file nor a possible hub id.
    """
    path = Path(model).expanduser()
    if is_gguf(model):
        if not path.is_file():
            raise ValueError(f"model {model!r}: there is no such file")
        return path.absolute()
    name, quant = (model, None) if path.is_dir() else split_quant(model)
    folder = _local_folder(name)
    if folder is None:
        import huggingface_hub

        with contextlib.suppress(Exception):
            cached = huggingface_hub.snapshot_download(
                name, revision=revision, local_files_only=True, cache_dir=hub.folder
            )
            folder = Path(cached)
    if folder is None or (quant is None and (_has_safetensors(folder) or not model_names(_names_in(folder)))):
        return folder
    return folder / choose_files(_names_in(folder), quant, name)[0]


def cache_folder() -> Path:
    """The folder in which downloaded models lie."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _explain(model: str, revision: str | None, error: Exception, hub: HubAccess) -> str:
    """The message for an error of the hub, with a fix."""
    from huggingface_hub import errors

    what = f"model {model!r}: there is no such folder, and"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"model {model!r} has no revision {revision!r} on the hub; give a branch, tag or commit that it has"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"model {model!r} is gated: accept its terms at https://huggingface.co/{model}, then set HF_TOKEN to a "
            "token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{what} the hub has none of that name that this account may see; check the spelling, or set HF_TOKEN if "
            "it is private"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{what} it is not in the hub cache while HF_HUB_OFFLINE is set; unset it to download the model, or give "
            "a folder with it"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"{what} the hub answered: {_first_line(error)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"model {model!r}: the disk of {hub.folder or cache_folder()} is full; free some space, or set HF_HOME to "
            "a larger disk"
        )
    return (
        f"{what} the hub cannot be reached ({type(error).__name__}: {_first_line(error)}), nor is the model in its "
        "cache; check the network (HF_ENDPOINT names a mirror) and try again, or give a folder with the model"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
