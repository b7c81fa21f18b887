"""What an endpoint answers to a prompt: its tokens, how likely they were, and when they came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardline.benchmark.backends import StreamExchange
from shardline.benchmark.http_client import HttpClient

NUM_TOP = 5
"""How many of the likeliest tokens an endpoint is asked for at each position."""
_NOTICE_SECONDS = 5.0
"""After this much silence it is said who is waited for."""
_LIST_SECONDS = 30.0
"""How long the list of models may take."""
_SILENCE_SECONDS = 600.0
"""How long an answer may bring nothing: as long as OpenAI's own clients wait."""


@dataclass(frozen=True)
class Endpoint:
    """A server with the OpenAI API. `url` is its address without /v1; no `model`: the first that it lists."""

    url: str
    model: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Token:
    """A token of an answer."""

    text: str
    logprob: float | None
    """Natural logarithm of its probability; None: the endpoint does not say."""
    top: Mapping[str, float]
    """The likeliest tokens at its position with their log probabilities, its own among them."""


@dataclass
class Answer:
    """An answer. Times are in seconds."""

    tokens: list[Token] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """The arrival of each piece of the stream."""
    sent: float = 0.0
    text: str = ""
    error: str = ""
    """Why there is no whole answer; empty: there is one."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the endpoint says how likely every token was."""
        return bool(self.tokens) and all(token.logprob is not None for token in self.tokens)

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.sent if self.times else 0.0

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 if there is none."""
        return (self.times[-1] - self.times[0]) / (self._count - 1) if self._count > 1 else 0.0

    @property
    def rate(self) -> float:
        """Tokens each second, from sending the request to the last piece."""
        return self._count / (self.times[-1] - self.sent) if self.times else 0.0

    @property
    def _count(self) -> int:
        return len(self.tokens) if self.has_logprobs else len(self.times)


@dataclass(frozen=True)
class Options:
    """How every prompt is asked; `temperature` 0 is greedy.

    Raises:
        ValueError: `extra_body` asks for what is not one streamed answer to each prompt.
    """

    chat: bool = False
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("stream", True), ("n", 1), ("best_of", 1), ("echo", False)):
            if (given := self.extra_body.get(name, value)) != value:
                raise ValueError(
                    f"extra_body must not set {name} to {given!r:.80}: answers are compared as one stream each"
                )


class Asker:
    """Asks one endpoint, one prompt after another, over one connection. `on_wait` is told when it is long silent.

    Raises:
        ValueError: the endpoint's URL is none.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        options: Options,
        *,
        insecure: bool = False,
        on_wait: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.url = endpoint.url.rstrip("/").removesuffix("/v1")
        self.model = endpoint.model or ""
        self._client = HttpClient(self.url, insecure=insecure)
        self._headers = {"Content-Type": "application/json", **endpoint.headers}
        self._options = options
        self._on_wait = on_wait
        self._gave_up = ""

    async def start(self) -> None:
        """Find the model's name, if none is given.

        Raises:
            RuntimeError: the endpoint cannot be reached, or lists no model.
        """
        try:
            if self.model:
                await self._client.check()
                return
            sent, fetched = time.perf_counter(), self._client.fetch("GET", "/v1/models", self._headers)
            coming = asyncio.ensure_future(fetched)
            if not await self._wait(coming, lambda: sent, _LIST_SECONDS):
                coming.cancel()
                raise RuntimeError(f"{self.url}/v1/models has not answered within {_LIST_SECONDS:.0f} s")
            status, body = coming.result()
        except OSError as error:
            raise RuntimeError(f"cannot connect to {self.url} ({error or 'it does not answer'})") from error
        try:
            self.model = str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.MsgspecError, KeyError, TypeError, IndexError) as error:
            way = "give its key (--header Authorization='Bearer KEY')" if status in (401, 403) else "say which one"
            raise RuntimeError(f"{self.url}/v1/models answers {status} and names no model: {way}") from error

    async def ask(self, prompt: str) -> Answer:
        """The endpoint's answer. What fails is its `error`. An endpoint that fell silent is not asked again."""
        if self._gave_up:
            return Answer(error=self._gave_up)
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        path = "/v1/chat/completions" if self._options.chat else "/v1/completions"
        body = msgspec.json.encode(self._body(prompt))
        request = self._client.head("POST", path, self._headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body
        exchange = _AnswerExchange(request, done)
        self._client.send(exchange)
        if not await self._wait(done, lambda: exchange.heard, _SILENCE_SECONDS):
            self._client.close()
            self._gave_up = "not asked: it has not answered an earlier prompt"
            exchange.on_failure("no answer", f"nothing came for {_SILENCE_SECONDS:.0f} s", time.perf_counter())
        return await done

    async def _wait(self, coming: asyncio.Future[Any], heard: Callable[[], float], limit: float) -> bool:
        """Whether it came, or was refused, before `limit` seconds without a word."""
        notice = _NOTICE_SECONDS
        while not coming.done():
            silent = time.perf_counter() - heard()
            if silent >= limit:
                return False
            if silent >= notice:
                self._on_wait(f"waiting for {self.url}, which has been silent for {silent:.0f} of {limit:.0f} s")
                notice = limit
            await asyncio.wait([coming], timeout=min(_NOTICE_SECONDS, limit - silent))
        return True

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _body(self, prompt: str) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed,
            "stream": True,
        }
        if options.chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": NUM_TOP}
        else:
            body |= {"prompt": prompt, "logprobs": NUM_TOP}
        return body | dict(options.extra_body)


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float


class _ChatLogprob(_TokenLogprob):
    top_logprobs: list[_TokenLogprob] | None = None


class _Logprobs(msgspec.Struct):
    """Those of completions, and of chats (`content`)."""

    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_ChatLogprob] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None


class _AnswerExchange(StreamExchange):
    """An exchange that collects an Answer."""

    def __init__(self, request: bytes, done: asyncio.Future[Answer]) -> None:
        super().__init__(request)
        self._answer = Answer()
        self._is_whole = False
        self._done = done

    @property
    def heard(self) -> float:
        """When the last piece came, or the request went."""
        return self._answer.times[-1] if self._answer.times else self._answer.sent or time.perf_counter()

    def on_sent(self, now: float) -> None:
        self._answer.sent = self._answer.sent or now

    def read_payload(self, payload: bytes, now: float) -> None:
        try:
            event = msgspec.json.decode(payload, type=_Event)
        except msgspec.MsgspecError as error:
            self.set_failure("malformed event", str(error))
            return
        if event.error:
            self.set_failure("error in the stream", str(event.error))
        for choice in (event.choices or ())[:1]:
            self._is_whole |= choice.finish_reason is not None
            delta = choice.delta or _Delta()
            text = choice.text or delta.content or delta.reasoning or delta.reasoning_content or ""
            tokens = _read_tokens(choice.logprobs)
            if choice.finish_reason == "stop" and (text or self._answer.tokens) and tokens:
                last = tokens[-1].text  # not every server lists the token that ends an answer, which is not in its text
                tokens = tokens if last and text.endswith(last) else tokens[:-1]
            if text or tokens:
                self._answer.times.append(now)
                self._answer.text += text
                self._answer.tokens += tokens or [Token(text, None, {})]

    def read_whole(self, body: bytes, now: float) -> None:
        raise AssertionError("an answer is a stream")

    def end(self) -> None:
        if not self._answer.tokens:
            self.set_failure("no output", "the stream ended without a token")
        elif not self._is_whole:
            self.set_failure("cut", f"the stream ended after {self._answer.text[-40:]!r} without a finish_reason")
        if not self._done.done():
            self._done.set_result(self._answer)

    def set_failure(self, cause: str, detail: str) -> None:
        self._answer.error = self._answer.error or f"{cause}: {detail}"


def _read_tokens(found: _Logprobs | None) -> list[Token]:
    if found is None:
        return []
    if found.content is not None:
        return [
            Token(one.token, one.logprob, {t.token: t.logprob for t in (*(one.top_logprobs or ()), one)})
            for one in found.content
        ]
    tokens, logprobs, top = found.tokens or [], found.token_logprobs or [], found.top_logprobs or []
    padded = [*top, *[None] * (len(tokens) - len(top))]
    return [
        Token(text, logprob, dict(others or {}) | ({} if logprob is None else {text: logprob}))
        for text, logprob, others in zip(tokens, logprobs, padded, strict=False)
    ]
