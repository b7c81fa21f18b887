"""A fake engine with fixed answers, so that the server can be tested without a model.

It replaces the engine process. AsyncLLM, the tokenizer and the chat template are the real ones.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence

from shardline.api.async_llm import AsyncLLM
from shardline.api.model_text import ModelText
from shardline.api.pooling import Pooler
from shardline.checkpoints.classifier import LabelConfig
from shardline.config.engine import EngineConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.engine import EngineFailed, EngineOutputs, EngineReady
from shardline.messages.request import FinishReason, Request, SequenceOutput, TokenLogprobs
from shardline.messages.stats import EngineStats
from shardline.messages.timeline import EngineTimeline
from shardline.text.chat_template import ChatTemplate
from shardline.text.tokenizer import Tokenizer
from tests.text.builders import TEMPLATE, byte_level_json, tokenizer

REPLY = "Hello, wörld 🙂! Bye."
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
Event = EngineOutputs | EngineFailed


class FakeEngine:
    """Replica 0. It answers every request with `reply` and EOS. Choices other than 0 begin with their number.

    `paused` holds the tokens back; `aborted` collects the ids of aborted engine requests.
    """

    def __init__(self, config: EngineConfig, replica: int, on_message: Callable[[Event], None]) -> None:
        self.tokenizer: Tokenizer = tokenizer(byte_level_json())
        self.aborted: list[str] = []
        self.requests: list[Request] = []
        self.paused = False
        self.embedding = [3.0, 4.0, 12.0] if config.embeds else []
        self.seconds_per_token = 0.0
        self.cached_tokens = 0
        self.num_resets = 0
        self.timeline: EngineTimeline | None = None
        self.reply = REPLY
        self.refusal = ""
        """Why every request is refused; empty: none is."""
        self.die_after_steps: int | None = None
        self.load = threading.Event()
        self.reload = threading.Event()
        """Whether the engine that follows this one may become ready."""
        self.reload.set()
        self.start_error: Exception | None = None
        self._on_message = on_message
        self._running: dict[str, tuple[Request, list[int]]] = {}
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        if not self.load.wait(timeout):
            raise TimeoutError
        if self.start_error is not None:
            raise self.start_error
        report = ["KV cache size: 1600 tokens"]
        return EngineReady(MAX_MODEL_LEN, BLOCK_SIZE, NumericContract("fake"), 25.0, report)

    def add(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self.requests += requests
            for request in requests:
                done = len(request.output_token_ids)
                self._running[request.request_id] = (request, self._reply(request)[done:])
                self._taken[request.request_id] = done
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            self.aborted += request_ids
            for request_id in request_ids:
                self._running.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def close(self, timeout: float = 10.0) -> None:
        self._closed = True
        self.load.set()
        self._wake.set()

    def die(self, message: str) -> None:
        """Fail like a killed engine process."""
        self._closed = True
        self._on_message(EngineFailed(message))

    def num_running(self) -> int:
        """Number of requests that hold KV blocks."""
        with self._lock:
            return len(self._running)

    def resume(self) -> None:
        self.paused = False
        self._wake.set()

    def _reply(self, request: Request) -> list[int]:
        text = f"{request.choice}{self.reply}" if request.choice else self.reply
        ids = self.tokenizer.encode_text(text, add_special_tokens=False)
        return [*ids, request.eos_token_ids[0]] if not request.sampling.ignore_eos else ids * 1000

    def _loop(self) -> None:
        while not self._closed:
            with self._lock:
                idle = self.paused or not self._running
            if idle:
                self._wake.wait(0.05)
                self._wake.clear()
                continue
            with self._lock:
                outputs = [self._step(request, ids) for request, ids in self._running.values()]
                for output in outputs:
                    if output.finish_reason is not None:
                        del self._running[output.request_id]
                used = len(self._running)
            stats = EngineStats(num_running=used, kv_blocks_total=100, kv_blocks_used=used, generation_tokens=7)
            self._on_message(EngineOutputs(outputs, stats))
            if self.die_after_steps is not None:
                self.die_after_steps -= 1
                if self.die_after_steps == 0:
                    self.die("rank 1 was killed")
            time.sleep(self.seconds_per_token)

    def _step(self, request: Request, ids: list[int]) -> SequenceOutput:
        if self.embedding:
            count = 1 if request.sampling.prompt_logprobs is None else len(request.prompt_token_ids)
            vector = array("f", self.embedding * count).tobytes()
            return SequenceOutput(request.request_id, [], finish_reason="stop", embedding=vector)
        if self.refusal:
            return SequenceOutput(request.request_id, [], finish_reason="error", error=self.refusal, refused=True)
        token_id = ids.pop(0)
        sampling = request.sampling
        taken = self._taken[request.request_id] = self._taken.get(request.request_id, 0) + 1
        reason: FinishReason | None = None
        if token_id in request.eos_token_ids:
            reason = "stop"
        elif taken == sampling.max_tokens:
            reason = "length"
        logprobs = None
        if sampling.logprobs is not None:
            others = [token_id, 5, 6, 7][: sampling.logprobs]
            logprobs = [TokenLogprobs(-0.5, 1, others, [-0.5, -1.5, -2.5, float("-inf")][: sampling.logprobs])]
        if sampling.logprob_token_ids is not None:
            named = [token_id, *sampling.logprob_token_ids]
            logprobs = [TokenLogprobs(-0.5, 1, named, [-0.5] * len(named), [1] * len(named))]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and taken == 1:
            ids = request.prompt_token_ids[1:]
            top = [5][: sampling.prompt_logprobs]
            prompt_logprobs = [TokenLogprobs(-1.0 - index, 2, top, [-0.5] * len(top)) for index in range(len(ids))]
        return SequenceOutput(
            request.request_id,
            [token_id],
            logprobs,
            ["d"] if sampling.logits_digest else None,
            reason,
            token_id if reason == "stop" else None,
            self.cached_tokens,
            prompt_logprobs=prompt_logprobs,
            timeline=self.timeline,
        )


def fake_llm(config: EngineConfig | None = None, labels: LabelConfig | None = None) -> tuple[AsyncLLM, FakeEngine]:
    """A real AsyncLLM over a FakeEngine; set `engine.load` to let it become ready. `labels`: those of a classifier."""
    engines: list[FakeEngine] = []

    def connect(config: EngineConfig, replica: int, on_message: Callable[[Event], None]) -> FakeEngine:
        engine = FakeEngine(config, replica, on_message)
        if labels is not None:
            engine.embedding = engine.embedding[: len(labels.labels)]
        if engines:
            engine.load = engines[0].reload
        engines.append(engine)
        return engine

    def load_text(config: EngineConfig) -> ModelText:
        own = tokenizer(byte_level_json())
        if config.model.skip_tokenizer_init:
            return ModelText(None, None, own.vocab_size, own.eos_token_ids)
        template, pooler = ChatTemplate(TEMPLATE, own.special_tokens), Pooler(3, labels) if config.embeds else None
        return ModelText(own, template, own.vocab_size, own.eos_token_ids, 3, pooler=pooler)

    llm = AsyncLLM(config or EngineConfig(), connect=connect, load_text=load_text)
    return llm, engines[0]
