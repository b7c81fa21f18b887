"""Offline batches: LLM(...).generate(prompts)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec

from shardline import env
from shardline.api.adapters import Adapters, LoRARequest
from shardline.api.batch import BatchRunner, Events, MakeBar, ProgressBar, RequestTimes, for_each
from shardline.api.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, run_searches, step_params
from shardline.api.engines import Connect
from shardline.api.errors import ContextLengthExceeded, EngineDead
from shardline.api.model_text import ModelText, load_model_text
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.pooled_batches import PooledBatches
from shardline.api.prompts import Prompt, TokensPrompt, as_prompts, type_of
from shardline.api.replicas import Replicas
from shardline.api.requests import ADAPTER_SALT, PreparedRequest, RequestBuilder, check_vocabulary
from shardline.api.streams import Streams
from shardline.config.engine import EngineConfig
from shardline.config.server import read_structured_outputs_config
from shardline.config.vllm import note_variables, options_from_variables
from shardline.messages.request import AdapterRef, Constraints
from shardline.messages.stats import EngineStats
from shardline.metrics.engine import EngineCollector
from shardline.metrics.reader import Metric, read_metrics
from shardline.receipts.check import ContractDiffers, Verdict, check_contract, check_output, not_verified
from shardline.receipts.receipt import Receipt
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from shardline.structured.checks import GrammarChecks
from shardline.text.chat_messages import Message
from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode
from shardline.text.model_files import read_template
from shardline.text.transformers_tokenizer import TransformersTokenizer

logger = logging.getLogger(__name__)


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _of_pooled(
    method: Callable[Concatenate[PooledBatches, Arguments], Result],
) -> Callable[Concatenate[LLM, Arguments], Result]:
    """A method of LLM that is one of its `PooledBatches`."""

    @functools.wraps(method)
    def call(llm: LLM, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Made for each call: kept, it would hold a reference to the LLM, and deleting that closes it.
        return method(PooledBatches(llm._text.pooler, llm._builder, llm._run_batch), *args, **kwargs)

    return call


class LLM:
    """An engine for batches of prompts.

    The options are those of `EngineConfig.from_options`, for example tensor_parallel_size=2, and
    `structured_outputs_config` and `chat_template` (a file, or the template itself), as of `shardline serve`. Several
    threads may use one LLM; it runs one batch at a time. Use it as a context manager, or call `close`.

    Raises:
        ValueError: the configuration is at fault.
        RuntimeError: the engine failed.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        chat_template: str | Path | None = None,
        structured_outputs_config: str | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._template_source = None if chat_template is None else read_template(str(chat_template))
        self._disable_any_whitespace = read_structured_outputs_config(structured_outputs_config)
        variables = env.vllm_variables()
        for line in note_variables(variables):
            logger.info("%s", line)
        config = EngineConfig.from_options(model=model, **{**options_from_variables(variables), **options})
        self._start(config, None, load_model_text)

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
        llm._template_source = llm._disable_any_whitespace = None
        llm._start(config, connect, load_text)
        return llm

    def _start(
        self, config: EngineConfig, connect: Connect | None, load_text: Callable[[EngineConfig], ModelText]
    ) -> None:
        if config.cluster.is_headless:
            from shardline.cluster.node import run_node

            sys.exit(run_node(config))
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._closed = False
        self._enqueued: list[PreparedRequest] = []
        self._grammars = GrammarChecks()
        events: Events = queue.SimpleQueue()
        self._events = events
        # The reader threads must hold no reference to this object: deleting the last one closes it.
        self._replicas = Replicas(config, lambda index, event: events.put((index, event)), connect)
        self.config = dataclasses.replace(config, cache=self._replicas.config.cache)
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
        self._runner = BatchRunner(self._replicas, Streams(self._replicas, text.tokenizer), events)
        self._builder = text.request_builder(config, self.max_model_len, ready[0].contract)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The outputs of one or several prompts, in the order of the prompts.

        Args:
            prompts: text, {"prompt": text}, {"prompt_token_ids": ids}, a list of ids, or a list of these.
            sampling_params: one for all prompts, or one for each; None: `get_default_sampling_params`.
            use_tqdm: show progress and tokens per second on stderr; or what makes the bar, as `tqdm.tqdm` does.
            lora_request: an adapter for all prompts, or one or None for each; None: no adapter.
            priority: one for all prompts, or one for each; requests with a lower number run first. None: 0.

        Raises:
            ValueError: a prompt or a parameter is invalid; then no prompt was run.
            RuntimeError: every replica has failed too often. (A choice that was running at several failures has the
                finish reason "error" and the message as `error`.)
        """
        return self.generate_timed(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority
        )[0]

    def generate_timed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> tuple[list[RequestOutput], list[RequestTimes]]:
        """As `generate`; also returns the times of each request."""
        if self._text.pooler is not None:
            raise ValueError(f"this LLM generates nothing (runner='pooling'); use {self._text.pooler.tasks[0]}()")
        batch = as_prompts(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = for_each(given, len(batch), "sampling_params", SamplingParams)
        priorities = _priorities(priority, len(batch))
        adapters = self._read_adapters(lora_request, len(batch))
        return self._run_batch(batch, params, use_tqdm, priorities, adapters)

    def _run_batch(
        self,
        batch: Sequence[Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool | MakeBar,
        priorities: Sequence[int],
        adapters: Sequence[AdapterRef | None] = (),
    ) -> tuple[list[RequestOutput], list[RequestTimes]]:
        with self._lock:
            return self._run_requests(self._build_requests(batch, params, priorities, adapters), use_tqdm)

    def _read_adapters(
        self, requests: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[AdapterRef | None]:
        """The adapter of each of `count` prompts."""
        each = for_each(requests, count, "lora_requests", LoRARequest, type(None))
        return [None if one is None else self._text.adapters.read(one.lora_path) for one in each]

    def _build_requests(
        self,
        batch: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        adapters: Sequence[AdapterRef | None] = (),
    ) -> list[PreparedRequest]:
        """`adapters`: that of each prompt; empty: there are none."""
        if self._closed:
            raise EngineDead("this LLM was closed; make a new one")
        requests = []
        adapters = adapters or [None] * len(batch)
        for prompt, sampling, priority, adapter in zip(batch, params, priorities, adapters, strict=True):
            grammar = self._write_grammar(sampling.structured_outputs)
            number = str(next(self._ids))
            request = self._builder.build_request(
                number, prompt, sampling, priority=priority, streamed=False, grammar=grammar, adapter=adapter
            )
            requests.append(request)
        return requests

    def _run_requests(
        self, requests: Sequence[PreparedRequest], use_tqdm: bool | MakeBar
    ) -> tuple[list[RequestOutput], list[RequestTimes]]:
        if os.getpid() != self._process:
            raise EngineDead(
                f"this LLM is that of process {self._process}, not of a fork of it; make one in each process"
            )
        with ProgressBar(len(requests), use_tqdm) as progress:
            return self._runner.run(requests, progress.count_request)

    def verify(self, receipts: Sequence[Receipt]) -> list[Verdict]:
        """Run the requests of receipts again, and say of each whether its output and all logits are the same bits.

        The outputs are known, so each step computes many of their tokens at once. The layout does not matter. Receipts
        are in `CompletionOutput.receipt`; `receipts.receipt.read_receipt` reads their JSON. Where nothing can be said
        of one, since it is of another model, dtype or kernel path, or has what the model does not take, its verdict has
        the reason as `error`.

        Raises:
            ValueError: these are no receipts, or the model generates nothing.
            RuntimeError: the engine failed.
        """
        if self._text.pooler is not None:
            raise ValueError("this LLM generates nothing (runner='pooling'), so it made no receipt")
        if not isinstance(receipts, Sequence) or not all(isinstance(one, Receipt) for one in receipts):
            raise ValueError(f"verify takes a list of receipts, as of CompletionOutput.receipt; got {receipts!r:.80}")
        with self._lock:
            requests: list[PreparedRequest] = []
            verdicts: list[Verdict | None] = []
            for receipt in receipts:
                try:
                    request_id = str(next(self._ids))
                    requests.append(_build_from_receipt(self._builder, self._text.adapters, request_id, receipt))
                    verdicts.append(None)
                except ValueError as error:
                    verdicts.append(not_verified(receipt, str(error)))
            outputs = iter(self._run_requests(requests, use_tqdm=False)[0])
        return [
            _judge(receipt, next(outputs)) if verdict is None else verdict
            for receipt, verdict in zip(receipts, verdicts, strict=True)
        ]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | MakeBar = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest outputs of each prompt, best first.

        `use_tqdm`: show the progress of every step. `concurrency_limit`: how many prompts are searched for at a time;
        None: all of them.

        Raises:
            ValueError: a prompt is invalid, or the beams need more log probabilities than `max_logprobs` allows.
            RuntimeError: a step has failed.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"beam_search takes BeamSearchParams(beam_width=4, max_tokens=32), not {params!r:.80}")
        adapter = self._read_adapters(lora_request, 1)
        sampling = step_params(params, self.config.model.seed, self._builder.logprob_counts)
        batch = as_prompts(prompts)
        with self._lock:
            checked = self._build_requests(batch, [sampling] * len(batch), [0] * len(batch))
        if any(request.children[0].embeds is not None for request in checked):
            raise ValueError("prompt_embeds are not supported with beam search")
        searches = [
            BeamSearch(request.prompt_token_ids, params, self._builder.eos_token_ids, self.max_model_len)
            for request in checked
        ]

        def run_step(prompts: Sequence[Prompt]) -> list[CompletionOutput]:
            count = len(prompts)
            outputs, _ = self._run_batch(prompts, [sampling] * count, use_tqdm, [0] * count, adapter * count)
            return [output.outputs[0] for output in outputs]

        each = concurrency_limit or max(1, len(searches))
        for first in range(0, len(searches), each):
            run_searches(searches[first : first + each], run_step)
        return [search.output(self._builder.require_tokenizer()) for search in searches]

    encode = _of_pooled(PooledBatches.encode)
    embed = _of_pooled(PooledBatches.embed)
    classify = _of_pooled(PooledBatches.classify)
    score = _of_pooled(PooledBatches.score)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[str]:
        """Check prompts as `generate` does and keep them for `wait_for_completion`; returns their request ids.

        Raises:
            ValueError: a prompt or a parameter is invalid; then none of these prompts was kept.
        """
        batch = as_prompts(prompts)
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = for_each(given, len(batch), "sampling_params", SamplingParams)
        priorities = _priorities(priority, len(batch))
        with self._lock:
            requests = self._build_requests(batch, params, priorities)
            self._enqueued += requests
        return [request.request_id for request in requests]

    def wait_for_completion(self, *, use_tqdm: bool | MakeBar = True) -> list[RequestOutput]:
        """Run what was enqueued since the last call; returns the outputs in the order of the prompts."""
        with self._lock:
            requests, self._enqueued = self._enqueued, []
            return self._run_requests(requests, use_tqdm)[0]

    def _write_grammar(self, form: StructuredOutputsParams | None) -> str:
        """The grammar of outputs; empty: they may be any text."""
        if form is None:
            return ""
        if form.disable_any_whitespace is None:
            form = msgspec.structs.replace(form, disable_any_whitespace=self._disable_any_whitespace)
        return self._grammars.write_grammar_blocking(form)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | MakeBar = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens_in_content: bool = False,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one or several conversations, in their order; see `generate`.

        `chat_template`: used instead of the model's own; None: that one. `continue_final_message`: the answer continues
        the last message. `chat_template_content_format` has no effect: templates get texts.
        `special_tokens_in_content`: whether a special token that a message spells becomes that token.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        is_single = not messages or not isinstance(messages, Sequence) or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if is_single else messages)
        for name, value, kind in (
            *(("messages", one, Sequence) for one in conversations),
            ("tools", tools, Sequence),
            ("chat_template_kwargs", chat_template_kwargs, Mapping),
        ):
            if value is not None and not isinstance(value, kind):
                what = "a list of objects" if kind is Sequence else "an object"
                raise ValueError(f"{name} must be {what}; got {type_of(value)}")
        prompts: list[Prompt] = []
        with self._open_template(chat_template) as template:
            for conversation in conversations:
                chat = Conversation(
                    conversation, tools, chat_template_kwargs or {}, add_generation_prompt, continue_final_message
                )
                text, ids = render_and_encode(
                    template,
                    self._builder.require_tokenizer(),
                    chat,
                    special_tokens_in_content=special_tokens_in_content,
                )
                prompts.append(TokensPrompt(prompt_token_ids=ids, prompt=text))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority)

    @contextlib.contextmanager
    def _open_template(self, source: str | None) -> Iterator[ChatTemplate]:
        """The chat template with this source, which is closed afterwards; None: the configured one, or the model's."""
        source = self._template_source if source is None else source
        if source is None:
            if self._text.chat_template is None:
                raise ValueError(f"{self.config.model.model} has no chat template; give one, or use generate()")
            yield self._text.chat_template
            return
        template = ChatTemplate(source, self._builder.require_tokenizer().special_tokens)
        try:
            yield template
        finally:
            template.close()

    def get_tokenizer(self) -> TransformersTokenizer:
        """The model's tokenizer, with the methods of transformers' tokenizers.

        Raises:
            ValueError: the model has no tokenizer.
        """
        return TransformersTokenizer(self._builder.require_tokenizer(), self._text.chat_template, self.max_model_len)

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts without parameters are run with: the model's generation config. Each call makes another one."""
        return SamplingParams(**self._text.sampling_defaults)

    def reset_prefix_cache(self) -> bool:
        """Let later prompts find nothing in the prefix cache that is there now. Returns True: it cannot fail."""
        with self._lock:
            self._replicas.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """The counters and gauges of the engines, with vLLM's names where they mean the same."""
        collector = EngineCollector(self.config.model.model, self.stats, dict)
        return read_metrics(collector.collect())

    @property
    def llm_engine(self) -> EngineView:
        """What programs ask vLLM's `llm_engine`."""
        return EngineView(lambda: self._runner.num_unfinished + len(self._enqueued), self.get_tokenizer)

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
        if replicas is not None and self._process == os.getpid():  # a fork must not end what is its parent's
            replicas.close()
            self._events.put(None)
            self._grammars.close()
            if self._text.chat_template is not None:
                self._text.chat_template.close()

    def __reduce__(self) -> str:
        raise TypeError("an LLM cannot be pickled or copied: it runs processes; make one in each process that needs it")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


@dataclass(frozen=True)
class EngineView:
    """The methods of vLLM's `LLM.llm_engine` that have a meaning here."""

    get_num_unfinished_requests: Callable[[], int]
    get_tokenizer: Callable[[], TransformersTokenizer]

    def has_unfinished_requests(self) -> bool:
        """Whether a request runs, or waits to be run."""
        return self.get_num_unfinished_requests() > 0


def _priorities(priority: int | Sequence[int] | None, count: int) -> list[int]:
    return for_each(0 if priority is None else priority, count, "priorities", int)


def _judge(receipt: Receipt, output: RequestOutput) -> Verdict:
    (choice,) = output.outputs
    if choice.error:
        return not_verified(receipt, choice.error)
    return check_output(receipt, choice.token_ids, choice.digests or ())


def _build_from_receipt(
    builder: RequestBuilder, adapters: Adapters, request_id: str, receipt: Receipt
) -> PreparedRequest:
    """The request of a receipt, which ends where its output would differ from the receipt's.

    Raises:
        ContractDiffers: it ran under another contract, which the message compares with this one, or with an adapter
            that has no name here.
        ContextLengthExceeded: this engine was started for shorter texts.
        ValueError: it has tokens or parameters that the model does not take.
    """
    assert builder.contract is not None
    check_contract(receipt, builder.contract)
    adapter = adapters.find(receipt.adapter)
    if receipt.adapter and adapter is None:
        raise ContractDiffers(
            f"the receipt is of the adapter {receipt.adapter[:16]}…, and none of --lora-modules has this content"
        )
    ids, output = receipt.prompt_token_ids, receipt.output_token_ids
    builder.check_prompt(ids)
    if len(ids) + len(output) > builder.max_model_len:
        raise ContextLengthExceeded(
            f"prompt and output of the receipt have {len(ids) + len(output)} tokens, more than the "
            f"{builder.max_model_len} that this engine was started for; raise --max-model-len"
        )
    request = receipt.request(f"{request_id}-0", time.monotonic(), adapter)
    if adapter is not None:
        request = msgspec.structs.replace(request, cache_salt=ADAPTER_SALT + adapter.digest)
    own = request.constraints or Constraints()
    params = msgspec.structs.replace(request.sampling, allowed_token_ids=own.allowed_token_ids or None)
    builder.check_params(params)
    check_vocabulary("top_k", [params.top_k] if params.top_k > 0 else (), builder.vocab_size)
    check_vocabulary("output_token_ids", output, builder.vocab_size)
    check_vocabulary("eos_token_ids", receipt.eos_token_ids, builder.vocab_size)
    check_vocabulary("bad_words", [token_id for word in own.bad_words for token_id in word], builder.vocab_size)
    return PreparedRequest(request_id, None, ids, request.sampling, [request])
