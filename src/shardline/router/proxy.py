"""Gives each request to a backend, and its answer to the client.

Until the first byte of an answer has gone to the client, a request that fails is given to another backend. A stream
that breaks off goes on at a backend with an equal numeric contract. Refusals of what the client asks (4xx) are the
client's; a backend that is full (429, 503) is left alone for as long as it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec
from starlette.types import Receive, Scope, Send

from shardline.config.router import RouterConfig
from shardline.router.fleet import Backend, Choice, Fleet
from shardline.router.kept_responses import PATH as RESPONSES
from shardline.router.kept_responses import KeptResponses, response_of
from shardline.router.metrics import RouterMetrics
from shardline.router.prompts import Prompt, cached_share, read_prompt
from shardline.router.queue import Queue
from shardline.router.rendering import rendered_tokens
from shardline.router.transcript import Transcript
from shardline.router.upstream import Answer, Header, UpstreamError
from shardline.server.error_shapes import error_answer, error_end
from shardline.server.errors import SERVER_ERROR, ApiError, unavailable
from shardline.server.middleware import REQUEST_ID
from shardline.server.sse import COMMENT, PROBE_CLIENT, STREAM_ERROR, WRITE_NOW

_WHOLE_BYTES = 1 << 20
"""An answer that is no stream and no larger is read whole before the client gets it: until then it can be retried."""
_BUSY_SECONDS, _MOST_BUSY_SECONDS = 0.25, 10.0
"""How long a backend that is full is left alone, if it does not say, and at most."""
_LEAVING_SECONDS = 0.05
"""After which a backend has noticed that a client has left."""
_USAGE_BYTES = 2048
"""The end of a stream that has its usage."""
_ENDS_OF_EVENTS = (b"\n\n", b"\n\r\n")
_RETRY_SHARE, _RETRY_RESERVE = 0.2, 10.0
_OF_ONE_CONNECTION = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
_RESUMABLE = ("/v1/chat/completions", "/v1/completions", "/v1/messages", RESPONSES)
_BATCHES = "/v1/batches"
"""Only the backend that keeps a batch's file, or the batch, can run or cancel it."""
_REPLACED = _OF_ONE_CONNECTION | {b"host", b"content-length", b"expect", b"x-request-id", b"x-shardline-route"}
_NOT_PASSED_ON = _OF_ONE_CONNECTION | {b"date", b"server", b"x-request-id"}


class RetryBudget:
    """Retries are at most a fifth of the requests, so that a fleet that fails is not asked for ever more."""

    def __init__(self) -> None:
        self._left = _RETRY_RESERVE

    def earn(self) -> None:
        """A request came."""
        self._left = min(self._left + _RETRY_SHARE, _RETRY_RESERVE)

    def spend(self) -> bool:
        """Whether a retry may be made; it is made."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


@dataclass
class Job:
    """A request as it goes to backends."""

    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes
    prompt: Prompt
    explains: bool
    """The client asks which backend answered, and why."""
    choice: Choice | None = None
    """The backend that it was given to; None: it is asked of all."""
    holder: Backend | None = None
    """The only backend that can answer, since it keeps the response that this one continues."""
    can_resume: bool = False
    """It asks for a stream that another backend can go on with."""
    has_begun: bool = False
    """The client has got the head of the answer, which is a stream."""
    transcript: Transcript = field(default_factory=Transcript)
    """Of that stream."""
    tail: bytes = b""
    """The end of what the client has got."""

    def body_for(self, backend: Backend) -> bytes:
        """The body as a backend gets it: one that states a numeric contract sends marks, or goes on after them."""
        if not (self.can_resume and backend.contract):
            return self.body
        resume = msgspec.json.encode(self.transcript.so_far if self.has_begun else {})
        return self.body.rstrip()[:-1] + b',"resume":' + resume + b"}"

    def can_go_to(self, backend: Backend) -> bool:
        """Whether a backend can answer, or go on with the answer."""
        if not self.has_begun:
            return True
        so_far = self.transcript.so_far
        return so_far is not None and so_far.contract == backend.contract


@dataclass(frozen=True)
class Refusal:
    """What a backend said, or that it said nothing, when another one may still do better."""

    backend: Backend
    problem: str
    status: int = 0
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    retry_after: float | None = None
    """Seconds, if the backend is full."""

    @property
    def is_full(self) -> bool:
        """Whether the backend only has no room."""
        return self.retry_after is not None


class Proxy:
    """An ASGI application. Its client's departure cancels it."""

    def __init__(self, fleet: Fleet, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._budget = RetryBudget()
        self._queue = Queue(config.max_queue)
        self._kept = KeptResponses(fleet)
        metrics.waiting.set_function(lambda: len(self._queue))
        key = config.backend_api_key
        self._key = None if key is None else b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            body = await _read_body(receive)
            if body is None:
                return  # the client has left
            job = self._make_job(scope, body)
            asked = response_of(scope["method"], scope["path"])
            if scope["method"] == "POST" and not asked and not scope["path"].startswith(_BATCHES):
                await self._generate(job, scope, send)
            else:
                await self._look_up(job, scope, send, asked)
        except ApiError as error:
            await error_answer(error, scope["path"])(scope, receive, send)

    def _make_job(self, scope: Scope, body: bytes) -> Job:
        headers, explains, session = [], False, ""
        for name, value in scope["headers"]:
            explains = explains or name == b"x-shardline-route"
            if name == b"x-session-id":
                session = value[:512].decode("latin-1")
            if name not in _REPLACED and not (self._key and name in (b"authorization", b"x-api-key")):
                headers.append((name, value))
        headers.append((b"x-request-id", scope[REQUEST_ID].encode()))
        if self._key:
            headers.append((b"authorization", self._key))
        target: bytes = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        prompt = read_prompt(body, session) if scope["method"] == "POST" else Prompt()
        can_resume = prompt.asks_for_stream and scope["path"] in _RESUMABLE and not prompt.previous_response
        return Job(scope["method"].encode(), target, headers, body, prompt, explains, can_resume=can_resume)

    async def _generate(self, job: Job, scope: Scope, send: Send) -> None:
        """Offer the request to backends until one takes it, or the time to wait for one is over."""
        began = time.monotonic()
        model = job.prompt.model
        if not self._fleet.serves(model):
            known = ", ".join(str(entry["id"]) for entry in self._fleet.models()) or "none yet"
            message = f"The model `{model}` does not exist. The backends serve: {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        if job.prompt.previous_response and scope["path"] == RESPONSES:
            headers, timeout = job.headers, self._config.connect_timeout
            job.holder = await self._kept.find_previous(job.prompt.previous_response, headers, timeout)
        self._budget.earn()

        def busy_seconds() -> float:
            return self._fleet.busy_seconds(model, job.holder)

        place = self._queue.place(job.prompt.priority, lambda: not busy_seconds())

        async def wait() -> bool:
            left = began + self._config.queue_timeout - time.monotonic()
            return await self._queue.wait(place, left, busy_seconds())

        if busy_seconds():
            await wait()
        refusals = await self._offer(job, scope, send, began)
        while refusals and not job.has_begun and all(refusal.is_full for refusal in refusals) and await wait():
            refusals = await self._offer(job, scope, send, began)
        if refusals is None:
            return
        if not job.has_begun:
            self._metrics.unrouted.inc()
        await self._refuse(job, refusals, scope, send)

    async def _offer(self, job: Job, scope: Scope, send: Send, began: float) -> list[Refusal] | None:
        """Give the request to one backend after another. None: one has answered."""
        model = job.prompt.model
        refusals: list[Refusal] = []
        while len(refusals) <= self._config.retries:
            tried = [refusal.backend for refusal in refusals]
            candidates = [one for one in self._fleet.candidates(model, tried, job.holder) if job.can_go_to(one)]
            if not candidates or (refusals and not job.has_begun and not self._budget.spend()):
                break
            if self._config.policy == "kv_aware" and job.prompt.token_ids is None and not (refusals or job.holder):
                token_ids = await rendered_tokens(job.target, job.headers, job.body, job.prompt.text, candidates)
                job.prompt = dataclasses.replace(job.prompt, token_ids=token_ids)
                candidates = self._fleet.candidates(model, tried) or candidates
            choice = job.choice = self._fleet.choose(job.prompt, candidates)
            if job.has_begun:
                self._metrics.resumes.inc()
            elif refusals:
                self._metrics.retries.inc()
            else:
                self._metrics.added.observe(time.monotonic() - began)
            had_begun = job.has_begun
            refusal = await self._try(choice.backend, job, scope, send, len(refusals) + 1)
            if refusal is None:
                return None
            if job.has_begun and not had_begun:
                refusals.clear()  # those that were full when it began may go on with it
            refusals.append(refusal)
        return refusals

    async def _look_up(self, job: Job, scope: Scope, send: Send, response_id: str) -> None:
        """Ask all backends for what one of them may have; the first that has it answers.

        `response_id`: it is a response with this id, of which only its backend is asked if that is known.
        """
        refusals: list[Refusal] = []
        holder = self._kept.find(response_id)
        asked = self._fleet.reachable() if holder is None else [holder]
        for backend in asked:
            refusal = await self._try(backend, job, scope, send, len(refusals) + 1, passes_on_404=False)
            if refusal is None:
                return
            refusals.append(refusal)
        unknown = [refusal for refusal in refusals if refusal.status != HTTPStatus.NOT_FOUND]
        away = [backend for backend in self._fleet.backends if holder is None and backend not in asked]
        if refusals and not unknown and away:
            state = away[0].state(time.monotonic())
            message = f"No backend that answers has {scope['path']}, and {away[0].url}, which may, is {state} now."
            raise unavailable(message, "no_backend", 1)
        await self._refuse(job, unknown or refusals, scope, send)  # who has not answered may have it

    async def _try(
        self, backend: Backend, job: Job, scope: Scope, send: Send, number: int, *, passes_on_404: bool = True
    ) -> Refusal | None:
        """Give a request to a backend. None: the client has its answer, or as much of it as there was."""
        with self._running(backend, job):
            try:
                timeout = self._config.answer_timeout
                body = job.body_for(backend)
                answer = await backend.upstream.send(job.method, job.target, job.headers, body, timeout)
            except UpstreamError as error:
                return self._note_failure(backend, str(error))
            try:
                passes = answer.status == 200 if job.has_begun else answer.status < 500 and answer.status != 429
                if not passes or (answer.status == 404 and not passes_on_404):
                    return await self._read_refusal(backend, answer)
                return await self._relay(backend, answer, job, scope, send, number)
            except UpstreamError as error:
                job.transcript.cut()
                return self._note_failure(backend, str(error), "cut" if job.has_begun else "failed")
            finally:
                answer.close()

    def _note_failure(self, backend: Backend, problem: str, outcome: str = "failed") -> Refusal:
        backend.breaker.fail(time.monotonic())
        self._metrics.outcomes.labels(backend.url, outcome).inc()
        return Refusal(backend, problem)

    async def _read_refusal(self, backend: Backend, answer: Answer) -> Refusal:
        """What a backend says that cannot answer, and what follows for later requests."""
        body = await answer.read_all(self._config.connect_timeout, _WHOLE_BYTES)
        headers = tuple(_passed_on(answer.headers))
        retry_after: float | None = None
        outcome = "refused"
        if answer.status in (429, 503):
            outcome, retry_after = "busy", _seconds(answer.header(b"retry-after"))
            backend.busy_until = time.monotonic() + min(retry_after or _BUSY_SECONDS, _MOST_BUSY_SECONDS)
            retry_after = retry_after or 1.0
            backend.breaker.succeed()
        elif answer.status >= 500:
            outcome = "failed"
            backend.breaker.fail(time.monotonic())
        else:
            backend.breaker.succeed()
        self._metrics.outcomes.labels(backend.url, outcome).inc()
        return Refusal(backend, f"it says {answer.status}", answer.status, headers, body, retry_after)

    async def _relay(
        self, backend: Backend, answer: Answer, job: Job, scope: Scope, send: Send, number: int
    ) -> Refusal | None:
        """Send an answer on as it comes. The client gets nothing before the first byte of its body is there.

        Raises:
            UpstreamError: the backend has failed; the client has got nothing, or the answer is a stream.
        """
        timeout, went_on = self._config.answer_timeout, job.has_begun
        is_stream = answer.header(b"content-type").startswith(b"text/event-stream")
        if not job.has_begun:
            job.transcript = Transcript(is_plain=not (job.can_resume and backend.contract))
        if is_stream:
            part = await self._read_events(answer, job)
        else:
            part = await answer.read_all(timeout, _WHOLE_BYTES)
        if job.choice is not None and not is_stream:
            job.choice.begin()
        backend.breaker.succeed()
        if not job.has_begun:
            headers = _passed_on(answer.headers)
            if job.explains:
                headers.append((b"x-shardline-route", self._explain(backend, number, job.choice)))
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            job.has_begun = is_stream
            if is_stream and not answer.header(b"content-length") and (write_now := scope.get(WRITE_NOW)):
                scope[PROBE_CLIENT] = lambda: job.tail.endswith(_ENDS_OF_EVENTS) and write_now(COMMENT)
        may_name = scope["path"] == RESPONSES
        if went_on and may_name and job.transcript.so_far is not None:
            self._kept.note(job.transcript.so_far.id, backend)
        try:
            num_parts = 0
            while part:
                if may_name:
                    may_name = not self._kept.learn(part, backend)
                await send({"type": "http.response.body", "body": part, "more_body": True})
                job.tail = job.tail[-_USAGE_BYTES:] + part
                part = await (self._read_events(answer, job) if is_stream else answer.read(timeout))
                num_parts += 1
                if job.choice is not None and num_parts == 1:
                    job.choice.begin()  # the first part of a stream may be no token
        except UpstreamError as error:
            if is_stream:
                raise
            scope[STREAM_ERROR] = "backend_failed"
            self._note_failure(backend, str(error), "cut")
            return None  # the client's connection ends before the length that it was told
        except BaseException:
            self._metrics.outcomes.labels(backend.url, "left").inc()
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._note_cached(job.choice, job.tail)
        if is_stream and job.choice is not None and not went_on:
            self._fleet.note_pace(job.choice, num_parts)
        self._metrics.outcomes.labels(backend.url, "ok" if answer.status < 400 else "refused").inc()
        self._note_room(backend)
        return None

    @contextlib.contextmanager
    def _running(self, backend: Backend, job: Job) -> Iterator[None]:
        """The request counts as the backend's load."""
        choice = job.choice
        backend.breaker.begin(time.monotonic())
        backend.num_requests += 1
        backend.num_bytes += len(job.body)
        try:
            yield
        except BaseException:  # the client has left
            asyncio.get_running_loop().call_later(_LEAVING_SECONDS, self._note_room, backend)
            raise
        finally:
            backend.breaker.give_up()
            backend.num_requests -= 1
            backend.num_bytes -= len(job.body)
            if choice is not None:
                choice.begin()

    def _note_room(self, backend: Backend) -> None:
        """A request that the backend had taken is over: it may have room for another."""
        if self._queue:
            backend.busy_until = 0.0
            self._queue.let_next_try()

    def _note_cached(self, choice: Choice | None, tail: bytes) -> None:
        """Compare what was expected in a cache with what the answer says at its end."""
        if choice is None or not choice.decision.chunks or (share := cached_share(tail)) is None:
            return
        self._fleet.note_cached(choice, share)
        chunks = choice.decision.chunks
        counts = {"all": chunks, "expected": min(chunks, choice.decision.chosen.warm_chunks), "found": share * chunks}
        for kind, count in counts.items():
            self._metrics.chunks.labels(choice.backend.url, kind).inc(count)

    def _explain(self, backend: Backend, number: int, choice: Choice | None) -> bytes:
        work = "" if choice is None else f"; work: {choice.explain()}"
        return f"{backend.url}; policy={self._fleet.policy}; attempt={number}{work}".encode("latin-1", "replace")

    async def _read_events(self, answer: Answer, job: Job) -> bytes:
        """The next events for the client of a stream; empty: it is whole.

        Raises:
            UpstreamError: the backend has failed, or says that it has.
        """
        while not job.transcript.problem and (data := await answer.read(self._config.answer_timeout)):
            if ready := job.transcript.read(data):
                return ready
        rest = b"" if job.transcript.problem else job.transcript.end()
        if job.transcript.problem:
            raise UpstreamError(job.transcript.problem)
        return rest

    async def _refuse(self, job: Job, refusals: list[Refusal], scope: Scope, send: Send) -> None:
        """The best answer that there is when no backend has answered, or the end of a stream that cannot go on.

        Raises:
            ApiError: that answer, where it is the router's own.
        """
        if job.has_begun:
            scope[STREAM_ERROR] = "backend_failed"
            end = _end_of_cut(job, refusals, scope["path"])
            await send({"type": "http.response.body", "body": end, "more_body": False})
            return
        if not refusals:
            now, backends = time.monotonic(), self._fleet.backends[:8]
            states = "; ".join(f"{backend.url}: {backend.problem or backend.state(now)}" for backend in backends)
            raise unavailable(f"No backend can take the request ({states or 'there are none'}).", "no_backend", 1)
        full = [refusal.retry_after for refusal in refusals if refusal.retry_after is not None]
        if full and len(full) == len(refusals):
            raise ApiError(
                429,
                f"All {len(full)} backends that were asked are full; try again later.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=max(1, round(min(full))),
            )
        said = [refusal for refusal in refusals if refusal.status]
        if said:
            best = min(said, key=lambda refusal: refusal.status)
            await send({"type": "http.response.start", "status": best.status, "headers": list(best.headers)})
            await send({"type": "http.response.body", "body": best.body, "more_body": False})
            return
        problems = "; ".join(f"{refusal.backend.url}: {refusal.problem}" for refusal in refusals)
        raise ApiError(
            HTTPStatus.BAD_GATEWAY, f"No backend has answered: {problems}.", type=SERVER_ERROR, code="backend_failed"
        )


async def _read_body(receive: Receive) -> bytes | None:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _passed_on(headers: list[Header]) -> list[Header]:
    return [(name, value) for name, value in headers if name not in _NOT_PASSED_ON]


def _seconds(retry_after: bytes) -> float | None:
    text = retry_after.decode("latin-1").strip()
    return float(text) if text.isdecimal() and len(text) < 6 else None


def _end_of_cut(job: Job, refusals: list[Refusal], path: str) -> bytes:
    """The end of a stream that cannot go on, in the shape of its endpoint."""
    why = ""
    if job.transcript.so_far is not None:
        why = " No other backend could go on with it: " + (
            "; ".join(f"{refusal.backend.url}: {refusal.problem}" for refusal in refusals[1:])
            or "none that is ready has the same numeric contract"
        )
    first = refusals[0]
    message = f"The backend {first.backend.url} failed in the middle of the answer: {first.problem}.{why}"
    error = ApiError(502, message, type=SERVER_ERROR, code="backend_failed")
    return error_end(error, path, 0 if job.transcript.so_far is None else job.transcript.so_far.num_events)
