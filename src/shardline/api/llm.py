"""Offline batches: LLM(...).generate(prompts)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, cast

from shardline.api.batch import BatchRunner, Events, ProgressBar, RequestTimes
from shardline.api.engines import Connect
from shardline.api.model_text import ModelText, load_model_text
from shardline.api.output_processor import OutputProcessor
from shardline.api.outputs import RequestOutput
from shardline.api.pooled_batches import PoolingMethods
from shardline.api.replicas import Replicas
from shardline.api.requests import EngineDead, Prompt, TokensPrompt, as_prompts
from shardline.config.engine import EngineConfig
from shardline.messages.stats import EngineStats
from shardline.sampling_params import SamplingParams
from shardline.structured.checks import GrammarChecks
from shardline.text.chat_messages import Message
from shardline.text.chat_template import Conversation, render_and_encode
from shardline.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLM(PoolingMethods):
    """An engine for batches of prompts.

    The options are those of `EngineConfig.from_options`, for example tensor_parallel_size=2. Several threads may use
    one LLM; it runs one batch at a time. Use it as a context manager, or call `close`.

    Raises:
        ValueError: the configuration is at fault.
        RuntimeError: the engine failed.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self._start(EngineConfig.from_options(model=model, **options), None, load_model_text)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        connect: Connect | None = None,
        load_text: Callable[[EngineConfig], ModelText] = load_model_text,
    ) -> LLM:
        """As the constructor, with a whole configuration; `connect` and `load_text` are for tests."""
        llm = cls.__new__(cls)
        llm._start(config, connect, load_text)
        return llm

    def _start(
        self, config: EngineConfig, connect: Connect | None, load_text: Callable[[EngineConfig], ModelText]
    ) -> None:
        if config.cluster.is_headless:
            from shardline.cluster.node import run_node

            sys.exit(run_node(config))
        self.config = config
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._closed = False
        self._grammars = GrammarChecks()
        events: Events = queue.SimpleQueue()
        self._events = events
        # The reader threads must hold no reference to this object: deleting the last one closes it.
        self._replicas = Replicas(config, lambda index, event: events.put((index, event)), connect)
        try:
            with ThreadPoolExecutor(1, "read-model") as pool:
                reading = pool.submit(load_text, self._replicas.config)
                ready = self._replicas.wait_ready()
                text = reading.result()
        except BaseException:
            self._replicas.close()
            raise
        self._text = text
        self.max_model_len = min(replica.max_model_len for replica in ready)
        self.fingerprint = ready[0].fingerprint
        self.report = [line for replica in ready for line in replica.report]
        for line in self.report:
            logger.info("%s", line)
        self._runner = BatchRunner(self._replicas, OutputProcessor(text.tokenizer), events)
        self._builder = text.request_builder(config, self.max_model_len)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of one or several prompts, in the order of the prompts.

        Args:
            prompts: text, {"prompt": text}, {"prompt_token_ids": ids}, a list of ids, or a list of these.
            sampling_params: one for all prompts, or one for each; None: SamplingParams().
            use_tqdm: show progress and tokens per second on stderr.
            priority: one for all prompts, or one for each; requests with a lower number run first. None: 0.

        Raises:
            ValueError: a prompt or a parameter is invalid; then no prompt was run.
            RuntimeError: every replica has failed too often. (A choice that was running at several failures has the
                finish reason "error" and the message as `error`.)
        """
        return self.generate_timed(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)[0]

    def generate_timed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
    ) -> tuple[list[RequestOutput], list[RequestTimes]]:
        """As `generate`; also returns the times of each request."""
        if self._text.pooler is not None:
            raise ValueError(f"this LLM generates nothing (runner='pooling'); use {self._text.pooler.tasks[0]}()")
        batch = as_prompts(prompts)
        params = _as_params(sampling_params, len(batch))
        return self._run_batch(batch, params, use_tqdm, _as_priorities(priority, len(batch)))

    def _run_batch(
        self, batch: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool, priorities: Sequence[int]
    ) -> tuple[list[RequestOutput], list[RequestTimes]]:
        with self._lock:
            if self._closed:
                raise EngineDead("this LLM was closed; make a new one")
            requests = []
            for prompt, sampling, priority in zip(batch, params, priorities, strict=True):
                form = sampling.structured_outputs
                grammar = "" if form is None else self._grammars.write_grammar_blocking(form)
                number = str(next(self._ids))
                request = self._builder.build_request(
                    number, prompt, sampling, priority=priority, streamed=False, grammar=grammar
                )
                requests.append(request)
            with ProgressBar(len(requests), enabled=use_tqdm) as progress:
                return self._runner.run(requests, progress.count_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_content: bool = False,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one or several conversations, in their order; see `generate`.

        `special_tokens_in_content`: whether a special token that a message spells becomes that token.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        template, tokenizer = self._text.chat_template, self._text.tokenizer
        if template is None or tokenizer is None:
            raise ValueError(f"{self.config.model.model} has no chat template; use generate()")
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_single else messages)
        prompts: list[Prompt] = []
        for conversation in conversations:
            chat = Conversation(conversation, tools, chat_template_kwargs or {}, add_generation_prompt)
            text, ids = render_and_encode(
                template, tokenizer, chat, special_tokens_in_content=special_tokens_in_content
            )
            prompts.append(TokensPrompt(prompt_token_ids=ids, prompt=text))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer. None: the model has no tokenizer."""
        return self._text.tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids: every id is smaller."""
        return self._text.vocab_size

    def stats(self) -> list[EngineStats]:
        """The latest counters of each replica."""
        return self._replicas.stats()

    def close(self) -> None:
        """End the engine processes; may be called again, and from any thread. A batch that runs ends with an error."""
        self._closed = True
        replicas = getattr(self, "_replicas", None)
        if replicas is not None:
            replicas.close()
            self._events.put(None)
            self._grammars.close()
            if self._text.chat_template is not None:
                self._text.chat_template.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(
            f"there are {count} prompts but {len(params)} sampling_params; give one for all, or one for each"
        )
    return list(params)


def _as_priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    if priority is None or isinstance(priority, int):
        return [priority or 0] * count
    if len(priority) != count:
        raise ValueError(f"there are {count} prompts but {len(priority)} priorities; give one for all, or one for each")
    return list(priority)
