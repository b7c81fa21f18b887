"""What the front reads from the model's files: tokenizer, chat template and vocabulary; no weights, no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shardline.api.pooling import Pooler
from shardline.api.requests import RequestBuilder
from shardline.config.engine import EngineConfig
from shardline.text.chat_template import ChatTemplate
from shardline.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelText:
    """What turns text into a model's token ids and back.

    `tokenizer` None: prompts must be token ids. `chat_template` None: the model does not support chats.
    """

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pooler: Pooler | None = None
    """What becomes of prompts that are not continued; None: prompts are continued."""

    def request_builder(self, config: EngineConfig, max_model_len: int) -> RequestBuilder:
        """A builder that checks requests against this model; it draws seeds from the configuration's seed."""
        return RequestBuilder(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=self.eos_token_ids,
            seeds=random.Random(config.model.seed),
        )


def load_model_text(config: EngineConfig) -> ModelText:
    """Read the tokenizer and the templates of the configured model; download them from the hub if necessary.

    Raises:
        ValueError: the model does not exist, or its files are broken.
    """
    from shardline.checkpoints.classifier import read_labels
    from shardline.checkpoints.hub import resolve_model, resolve_tokenizer
    from shardline.checkpoints.lookup import decoder_spec

    model = config.model
    files = resolve_model(model.model, model.revision, weights=False, load_format=model.load_format)
    source = files.text_source if model.tokenizer is None else resolve_tokenizer(model.tokenizer)
    tokenizer = Tokenizer.from_folder(source)
    spec, labels = decoder_spec(files.config), read_labels(files.config)
    tokenizer_eos_ids = () if tokenizer is None else tokenizer.eos_token_ids
    return ModelText(
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_folder(source, tokenizer.special_tokens if tokenizer is not None else None),
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*files.eos_token_ids, *tokenizer_eos_ids))),
        pooler=Pooler(spec.hidden_size, labels) if config.embeds or labels is not None else None,
    )
