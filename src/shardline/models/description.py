"""The description of a model: its files, its config.json, and the headers of its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.config.engine import ModelConfig
from shardline.models.checkpoint import Checkpoint
from shardline.models.hf_config import HFConfig
from shardline.models.hub import ModelFiles, resolve_model, resolve_tokenizer
from shardline.models.stored_weights import StoredRules, read_stored
from shardline.models.wrapper import text_config


@dataclass(frozen=True)
class ModelDescription:
    """A model on this host."""

    files: ModelFiles
    stored: StoredRules
    """How config.json says that weights are quantized. It is set for random weights too."""
    checkpoint: Checkpoint | None
    """The tensors in the checkpoint's headers; None: weights are random, and no checkpoint was read."""
    tokenizer_file: str = ""
    """Its tokenizer.json; empty: it has none."""


def read_model(config: ModelConfig) -> ModelDescription:
    """Read the files that describe a model. They are downloaded from the hub if they are not on this host yet.

    Raises:
        ValueError: the model cannot be found or reached, its config.json is wrong, or its checkpoint is damaged.
    """
    is_dummy = config.load_format == "dummy"
    files = resolve_model(config.model, config.revision, weights=not is_dummy)
    folder = files.folder if config.tokenizer is None else resolve_tokenizer(config.tokenizer)
    tokenizer_file = folder / "tokenizer.json"
    return ModelDescription(
        files=files,
        stored=read_stored(HFConfig(text_config(files.config))),
        checkpoint=None if is_dummy else Checkpoint.open(files.folder),
        tokenizer_file=str(tokenizer_file) if tokenizer_file.is_file() else "",
    )
