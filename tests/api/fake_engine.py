"""A fake engine without a model: the next token is a function of prompt, position and choice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from shardline.api.engines import EngineEvent
from shardline.api.model_text import ModelText
from shardline.api.pooling import Pooler
from shardline.config.engine import EngineConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.engine import EngineFailed, EngineOutputs, EngineReady
from shardline.messages.request import Request, SequenceOutput, TokenLogprobs
from shardline.messages.stats import EngineStats
from shardline.text.chat_template import ChatTemplate
from tests.text import builders

MAX_MODEL_LEN = 64
EOS = 1


def next_token(request: Request, position: int) -> int:
    """The token at output position `position`; never a special one."""
    return 5 + (sum(request.prompt_token_ids) + 31 * position + 7 * request.choice) % 390


def scripted(tokens: Sequence[int]) -> Callable[[Request, int], int]:
    """Always these tokens, then EOS."""
    return lambda request, position: tokens[position] if position < len(tokens) else EOS


def load_text(config: EngineConfig) -> ModelText:
    """Tokenizer and template of the fake model, whose vocabulary has 400 tokens and 8 of padding."""
    tokenizer = builders.tokenizer(builders.byte_level_json())
    assert tokenizer.eos_token_ids == (EOS,)
    template = ChatTemplate(builders.TEMPLATE, tokenizer.special_tokens)
    pooler = Pooler(hidden_size=2) if config.embeds else None
    return ModelText(tokenizer, template, tokenizer.vocab_size + 8, tokenizer.eos_token_ids, 3, pooler=pooler)


class FakeEngineClient:
    """Each step gives every running request `tokens_per_step` tokens; no step runs while `paused` is set."""

    def __init__(
        self,
        config: EngineConfig,
        replica: int,
        on_message: Callable[[EngineEvent], None],
        *,
        next_token: Callable[[Request, int], int] = next_token,
        tokens_per_step: int = 1,
        start_error: Exception | None = None,
        fingerprint: str = "fake",
    ) -> None:
        self.config, self.replica, self.fingerprint = config, replica, fingerprint
        self.paused = threading.Event()
        self.aborted: list[str] = []
        self._confirmed: list[str] = []
        """Aborted requests that the next message names."""
        self.added: list[Request] = []
        self.running: dict[str, tuple[Request, int]] = {}
        self.closed = False
        self.num_resets = 0
        self._on_message = on_message
        self._next_token, self._tokens_per_step, self._start_error = next_token, tokens_per_step, start_error
        self._changed = threading.Condition()
        self._dead = ""
        self._suspicious = False
        self._steps = 0
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        if self._start_error is not None:
            raise self._start_error
        self._thread.start()
        contract = NumericContract(self.fingerprint)
        return EngineReady(MAX_MODEL_LEN, 16, contract, 25.0, [f"replica {self.replica} is up"])

    def add(self, requests: Sequence[Request]) -> None:
        with self._changed:
            if self._dead:
                raise BrokenPipeError
            self.added.extend(requests)
            self.running.update({request.request_id: (request, len(request.output_token_ids)) for request in requests})
            self._changed.notify()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._changed:
            self.aborted.extend(request_ids)
            for request_id in request_ids:
                self.running.pop(request_id, None)
            self._confirmed.extend(request_ids)
            self._changed.notify()

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def close(self, timeout: float = 10.0) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def die(self, message: str, *, suspicious: bool = False) -> None:
        """Fail like an engine whose worker was killed; `suspicious`: or in which a step hung."""
        with self._changed:
            self._dead, self._suspicious = message, suspicious
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self.closed or self._dead or self._confirmed or self._may_step()):
                    self._changed.wait(0.01)
                if self.closed:
                    return
                outputs = []
                if self._may_step() and not self._dead:
                    outputs = [self._step(request_id) for request_id in list(self.running)]
                aborted, self._confirmed = self._confirmed, []
                stats = EngineStats(num_running=len(self.running), num_steps=self._steps, engine_seconds=0.1)
                self._steps += 1
            if self._dead:
                self._on_message(EngineFailed(self._dead, suspicious=self._suspicious))
                return
            self._on_message(EngineOutputs(outputs, stats, aborted))
            time.sleep(0.0005)

    def _may_step(self) -> bool:
        return bool(self.running) and not self.paused.is_set()

    def _step(self, request_id: str) -> SequenceOutput:
        request, position = self.running[request_id]
        params = request.sampling
        assert params.max_tokens is not None
        assert params.seed is not None
        tokens: list[int] = []
        reason, stop_token = None, None
        while reason is None and len(tokens) < self._tokens_per_step:
            token = self._next_token(request, position)
            tokens.append(token)
            position += 1
            ends = () if params.ignore_eos else request.eos_token_ids
            if token in ends or token in params.stop_token_ids:
                reason, stop_token = "stop", token
            elif position >= params.max_tokens:
                reason = "length"
        self.running[request_id] = (request, position)
        if reason is not None:
            del self.running[request_id]
        return SequenceOutput(
            request_id=request_id,
            token_ids=tokens,
            logprobs=None if params.logprobs is None else [TokenLogprobs(-0.5, 1, [t], [-0.5]) for t in tokens],
            digests=[f"{t:x}" for t in tokens] if params.logits_digest else None,
            finish_reason=reason,  # type: ignore[arg-type]
            stop_token_id=stop_token,
            num_cached_tokens=16,
        )


class FakeCluster:
    """Connects fake clients and keeps them for the test; `options` are those of FakeEngineClient."""

    def __init__(self, **options: object) -> None:
        self.clients: list[FakeEngineClient] = []
        self._options = options

    def __call__(
        self, config: EngineConfig, replica: int, on_message: Callable[[EngineEvent], None]
    ) -> FakeEngineClient:
        client = FakeEngineClient(config, replica, on_message, **self._options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client
