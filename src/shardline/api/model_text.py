"""The model as the front knows it: what it reads from the files, without weights and torch, and what there is once
engines are ready."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardline.api.adapters import Adapters
from shardline.api.pooling import Pooler, check_pooling
from shardline.api.requests import RequestBuilder
from shardline.api.streams import Streams
from shardline.config.engine import EngineConfig, ModelConfig
from shardline.config.fields import json_object
from shardline.config.lora import LoRAConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.engine import EngineReady
from shardline.sampling_params import SamplingParams
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
    embeds_size: int = 0
    """Numbers in a row of `prompt_embeds`; 0: the model takes none."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that leave them out, by the names of `SamplingParams`."""
    pooler: Pooler | None = None
    """What becomes of prompts that are not continued; None: prompts are continued."""
    adapters: Adapters = field(default_factory=lambda: Adapters(LoRAConfig(), None))
    """Those that requests may name."""

    def request_builder(
        self, config: EngineConfig, max_model_len: int, contract: NumericContract | None = None
    ) -> RequestBuilder:
        """A builder that checks requests against this model; it draws seeds from the configuration's seed."""
        return RequestBuilder(
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=self.eos_token_ids,
            seeds=random.Random(config.model.seed),
            max_logprobs=config.model.max_logprobs,
            embeds_size=self.embeds_size,
            takes_embeds=config.model.enable_prompt_embeds,
            has_watermark=config.model.watermark is not None,
            contract=contract,
        )

    def ready_model(self, config: EngineConfig, engines: Sequence[EngineReady], streams: Streams) -> ReadyModel:
        """The model that these engines serve; `streams`: of their outputs."""
        max_model_len = min(engine.max_model_len for engine in engines)
        first = engines[0]
        return ReadyModel(
            self.tokenizer,
            self.chat_template,
            max_model_len,
            first.block_size,
            first.contract,
            first.fingerprint,
            first.max_concurrency,
            [line for engine in engines for line in engine.report],
            self.request_builder(config, max_model_len, first.contract),
            streams,
            self.pooler,
            self.sampling_defaults,
            self.adapters,
            ("generate",) if self.pooler is None else self.pooler.tasks,
        )


@dataclass(frozen=True)
class ReadyModel:
    """What there is once every replica accepts requests."""

    tokenizer: Tokenizer | None
    """None: prompts must be token ids."""
    chat_template: ChatTemplate | None
    """None: the model does not support chats."""
    max_model_len: int
    """The longest prompt with its answer, in tokens."""
    block_size: int
    """Tokens in a block of the KV cache."""
    contract: NumericContract
    """Equal contracts mean equal answers."""
    fingerprint: str
    """The contract's name."""
    max_concurrency: float
    """How many requests of `max_model_len` tokens the KV cache of a replica holds at once."""
    report: list[str]
    """The lines of the engines about their start."""
    builder: RequestBuilder
    streams: Streams
    pooler: Pooler | None
    """What becomes of prompts that are not continued; None: prompts are continued."""
    sampling_defaults: Mapping[str, Any]
    """Sampling parameters of requests that leave them out; see `ModelText`."""
    adapters: Adapters
    """Those that requests may name."""
    tasks: tuple[str, ...]
    """What it can be asked for: to generate, or those of its pooler."""


_SAMPLING_KEYS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("temperature", "top_k", "top_p", "min_p", "max_new_tokens"),
)
"""What requests take from a generation config. Its last key has another name there."""


def read_sampling_defaults(config: ModelConfig, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a generation config, with those of --override-generation-config.

    Raises:
        ValueError: a value is out of its range.
    """
    found = {} if config.generation_config == "vllm" else dict(generation_config)
    found |= json_object("override_generation_config", config.override_generation_config)
    values = {key: found[key] for key in _SAMPLING_KEYS if found.get(key) is not None}
    if "max_new_tokens" in values:
        values["max_tokens"] = values.pop("max_new_tokens")
    try:
        msgspec.convert({**values}, SamplingParams)
    except ValueError as error:
        raise ValueError(
            f"the generation config cannot be used: {error}; set --override-generation-config or "
            "--generation-config vllm"
        ) from error
    return values


def load_model_text(config: EngineConfig) -> ModelText:
    """Read the tokenizer and the templates of the configured model; download them from the hub if necessary.

    Raises:
        ValueError: the model does not exist, its files are broken, or it makes vectors in another way.
    """
    from shardline.checkpoints.classifier import read_labels
    from shardline.checkpoints.description import resolve_configured, tokenizer_source
    from shardline.checkpoints.lookup import decoder_spec

    model = config.model
    files = resolve_configured(model, weights=False)
    source, spec = tokenizer_source(model, files), decoder_spec(files.config)
    labels = read_labels(files.config)
    if config.embeds and labels is None:
        check_pooling(files.folder)
    tokenizer = None if model.skip_tokenizer_init else Tokenizer.from_folder(source)
    tokenizer_eos_ids = () if tokenizer is None else tokenizer.eos_token_ids
    return ModelText(
        tokenizer=tokenizer,
        chat_template=None
        if model.skip_tokenizer_init
        else ChatTemplate.from_folder(source, tokenizer.special_tokens if tokenizer is not None else None),
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*files.eos_token_ids, *tokenizer_eos_ids))),
        # Layers that read token ids themselves have nothing to read.
        embeds_size=0 if spec.token_input is not None else spec.hidden_size,
        sampling_defaults=read_sampling_defaults(model, files.generation_config),
        pooler=Pooler(spec.hidden_size, labels) if config.embeds or labels is not None else None,
        adapters=Adapters(config.lora, spec, model.hub_access, experts=config.parallel.keeps_experts),
    )
