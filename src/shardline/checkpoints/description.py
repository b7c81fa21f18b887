"""The description of a model: its files, its config.json, and the headers of its checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.header import read_header
from shardline.checkpoints.gguf.names import is_gguf
from shardline.checkpoints.gguf.tokenizer import has_vocabulary
from shardline.checkpoints.heads import check_whole
from shardline.checkpoints.hub import ModelFiles, resolve_model, resolve_tokenizer
from shardline.checkpoints.lookup import decoder_spec, family, known_families, language_model_type, predictor
from shardline.checkpoints.quantization import read_stored
from shardline.checkpoints.vocabulary import check_same_vocabulary
from shardline.checkpoints.wrapper import text_config
from shardline.config.engine import EngineConfig, ModelConfig
from shardline.models.heads import HEADS, LIBRARY_KIND, eagle3_config, eagle_config, mtp_config
from shardline.models.hf_config import HFConfig
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import TensorEntry
from shardline.models.stored_weights import StoredRules

Found = TypeVar("Found")
_EAGLE3_KEY = "midlayer.hidden_norm.weight"
_LIBRARY_KEYS = {
    _EAGLE3_KEY: "layers.0.hidden_norm.weight",
    "fc.weight": "fusion_fc.weight",
    "fc.bias": "fusion_fc.bias",
}
"""The names that `speculators` gives to tensors of heads."""
_KV_SCALES = ("k_scale", "v_scale", "kv_scale")
"""Ends of the names of tensors that scale cached keys and values."""
_PREDICTED = "num_nextn_predict_layers"
"""Key of a configuration: how many layers for multi-token prediction its checkpoint has."""


@dataclass(frozen=True)
class ModelDescription:
    """A model on this host."""

    files: ModelFiles
    stored: StoredRules
    """How config.json or the GGUF file says that weights are quantized. It is set for random weights too."""
    checkpoint: Checkpoint | GGUFCheckpoint | None
    """The tensors in the checkpoint's headers; None: weights are random, and no checkpoint was read."""
    tokenizer_file: str = ""
    """Its tokenizer.json, or the GGUF file that has the tokenizer; empty: it has none."""
    draft: ModelDescription | None = None
    """The model that drafts for it; None: none does."""
    _specs: dict[int | None, DecoderSpec] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The specs that `spec` has made."""
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """See `keep`."""

    def spec(self, max_model_len: int | None = None) -> DecoderSpec:
        """The model for requests of up to `max_model_len` tokens; None: the longest that the configuration allows.

        Raises:
            ValueError: see `decoder_spec`.
        """
        if max_model_len not in self._specs:
            self._specs[max_model_len] = decoder_spec(self.files.config, max_model_len)
        return self._specs[max_model_len]

    def keep(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What `find` finds about this model. It is asked once for each key: a plan resolves hundreds of layouts.

        A key may have the id of a spec of this model, since the model keeps its specs.
        """
        if key not in self._kept:
            self._kept[key] = find()
        return cast(Found, self._kept[key])

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The tensors in the headers of safetensors files; none if there are no such files."""
        return self.checkpoint.tensors if isinstance(self.checkpoint, Checkpoint) else {}

    def type_of(self, tensor: str) -> str | None:
        """The type of one of `tensors`, as the files name it; None: there is none."""
        entry = self.tensors.get(tensor)
        return None if entry is None else entry.dtype


def resolve_configured(config: ModelConfig, *, weights: bool) -> ModelFiles:
    """The files of the configured model; see `resolve_model`."""
    return resolve_model(
        config.model,
        config.revision,
        weights=weights,
        load_format=config.load_format,
        hub=config.hub_access,
        overrides=config.config_overrides,
        generation_config=config.generation_config,
    )


def tokenizer_source(config: ModelConfig, files: ModelFiles) -> Path:
    """The folder or the GGUF file with the tokenizer; see `resolve_tokenizer`."""
    if config.tokenizer is None and config.tokenizer_revision is None:
        return files.text_source
    return resolve_tokenizer(config.tokenizer or config.model, config.tokenizer_revision, config.hub_access)


def read_models(config: EngineConfig) -> ModelDescription:
    """As `read_model`, with the model that drafts for it; raises the same errors as `with_draft`, too."""
    model = read_model(config.model)
    check_whole(model.files.config, model.tensors)
    return with_draft(model, config)


def with_draft(model: ModelDescription, config: EngineConfig) -> ModelDescription:
    """The model with the one that drafts for it, if the user wants one.

    Raises:
        ValueError: that one cannot be read, or it has another vocabulary.
    """
    asked, own = config.scheduler.speculation.draft, config.draft_model
    if asked is None or own is None:
        return model
    try:
        if asked.method == "mtp":
            return dataclasses.replace(model, draft=model.keep("mtp", lambda: _read_mtp(model)))
        draft = model.keep(own, lambda: read_model(own))
        vocab_size = draft.spec().vocab_size
        if asked.method == "draft_model":
            check_whole(draft.files.config, draft.tensors)
        else:
            drafts, read = draft, _read_eagle if asked.method == "eagle" else _read_eagle3
            draft = model.keep((asked.method, own), lambda: read(drafts, model.spec()))
        check_same_vocabulary((model.tokenizer_file, model.spec().vocab_size), (draft.tokenizer_file, vocab_size))
    except (ValueError, OSError) as error:
        what = f"the draft model {asked.model!r}" if asked.model else 'the method "mtp"'
        raise ValueError(f"{what} of speculative_config: {error}") from None
    return dataclasses.replace(model, draft=draft)


def _read_mtp(model: ModelDescription) -> ModelDescription:
    """The head that a model's own checkpoint has.

    Raises:
        ValueError: it has none.
    """
    config = text_config(model.files.config)
    model_type = language_model_type(config)
    if predictor(family(model_type)) is None:
        able = ", ".join(name for name in known_families() if predictor(family(name)))
        raise ValueError(f"it needs a model whose checkpoint has layers for it ({able}), and this is {model_type}")
    if not config.get(_PREDICTED):
        raise ValueError(f"the model has no layers for it ({_PREDICTED} of its config.json)")
    head = _with_config(model, mtp_config(config))
    key = family(head.spec().model_type).tensor_source("head_input.projection.weight", head.spec()).key
    if isinstance(model.checkpoint, GGUFCheckpoint):
        raise ValueError("GGUF files of models have no weights for it that can be read; use the model's safetensors")
    if model.checkpoint is not None and not model.checkpoint.has(key):
        raise ValueError(f"the checkpoint has no weights for it ({key} is missing); some copies of a model lack them")
    return head


def _read_eagle(head: ModelDescription, model: DecoderSpec) -> ModelDescription:
    """The files of a model as those of a head for `model`.

    Raises:
        ValueError: they are no head.
    """
    tensors = _tensors_of_head(head)
    if _EAGLE3_KEY in tensors or head.files.config.get(LIBRARY_KIND) == "eagle3":
        raise ValueError('it is an EAGLE 3 head; use the method "eagle3"')
    config, positions = text_config(head.files.config), model.max_position_embeddings
    return _with_config(head, eagle_config(config, positions, bias="fc.bias" in tensors))


def _read_eagle3(head: ModelDescription, model: DecoderSpec) -> ModelDescription:
    """As `_read_eagle`, for an EAGLE 3 head; raises the same errors, and those of `eagle3_config`."""
    tensors = _tensors_of_head(head)
    if (tensors and _EAGLE3_KEY not in tensors) or head.files.config.get(LIBRARY_KIND) == "eagle":
        raise ValueError(f'it is no EAGLE 3 head ({_EAGLE3_KEY} is missing); an older head needs the method "eagle"')
    config = eagle3_config(
        text_config(head.files.config),
        model.max_position_embeddings,
        len(model.layers),
        bias="fc.bias" in tensors,
        names_tokens="d2t" in tensors,
    )
    return _with_config(head, config)


def _tensors_of_head(head: ModelDescription) -> Collection[str]:
    """The keys of an EAGLE head, by their usual names; none if its weights are random.

    Raises:
        ValueError: it is a whole model.
    """
    tensors = {*head.tensors, *(usual for usual, name in _LIBRARY_KEYS.items() if name in head.tensors)}
    if head.checkpoint is not None and "fc.weight" not in tensors:
        raise ValueError('it is no EAGLE head (fc.weight is missing); a whole model needs the method "draft_model"')
    return tensors


def _with_config(model: ModelDescription, config: dict[str, Any]) -> ModelDescription:
    """The same files as another configuration describes them."""
    return dataclasses.replace(model, files=dataclasses.replace(model.files, config=config))


def read_model(config: ModelConfig) -> ModelDescription:
    """Read the files that describe a model. They are downloaded from the hub if they are not on this host yet.

    Raises:
        ValueError: the model cannot be found or reached, its config.json is wrong, or its checkpoint is damaged.
    """
    is_dummy = config.load_format == "dummy"
    files = resolve_configured(config, weights=not is_dummy)
    if files.model_type.startswith(HEADS):
        raise ValueError(f"model_type {files.model_type!r} is that of a head, which is no model alone")
    text_source = tokenizer_source(config, files)
    in_gguf = is_gguf(text_source)
    tokenizer_file = text_source if in_gguf else text_source / "tokenizer.json"
    has_tokenizer = has_vocabulary(read_header(text_source)) if in_gguf else tokenizer_file.is_file()
    checkpoint: Checkpoint | GGUFCheckpoint | None = None
    if not is_dummy:
        checkpoint = Checkpoint.open(files.folder) if files.gguf is None else GGUFCheckpoint.open(files.gguf)
        has_head = files.gguf is not None or any(key.startswith("lm_head.") for key in checkpoint.tensors)
        if config.embeds and not has_head:
            # No token is computed, and a tied head needs no weights of its own.
            files = dataclasses.replace(files, config={**files.config, "tie_word_embeddings": True})
    stored = read_stored(HFConfig(text_config(files.config)))
    if checkpoint is not None:
        ends = {key.rpartition(".")[2] for key in checkpoint.tensors}
        stored = replace(stored, unused=(*stored.unused, *(end for end in _KV_SCALES if end in ends)))
    return ModelDescription(
        files=files,
        stored=stored,
        checkpoint=checkpoint,
        tokenizer_file=str(tokenizer_file) if has_tokenizer and not config.skip_tokenizer_init else "",
    )
