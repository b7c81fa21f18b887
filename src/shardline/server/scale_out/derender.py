"""POST …/derender: the answer of /inference/v1/generate as the endpoint that rendered the request would write it.

Nothing is kept between the chunks of a stream: its client sends back every token so far, and they are read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response

from shardline.api.output_processor import RequestState
from shardline.api.outputs import RequestOutput
from shardline.api.requests import PreparedRequest
from shardline.messages.request import FinishReason, SequenceOutput, TokenLogprobs
from shardline.sampling_params import SamplingParams
from shardline.server.documentation import json_answers
from shardline.server.errors import ApiError, bad_request
from shardline.server.json_body import StrictRoute
from shardline.server.openai.answer_format import AnswerFormat
from shardline.server.openai.chat.request import ChatRequest, TransferParams, prepare_chat
from shardline.server.openai.chat.writer import ChatResponse, ChatWriter
from shardline.server.openai.completions.request import CompletionRequest
from shardline.server.openai.completions.writer import CompletionResponse, CompletionWriter
from shardline.server.openai.generation import Generation, as_api_error
from shardline.server.openai.protocol import MAX_CHOICES_PER_HTTP_REQUEST, RequestModel, TokenIds, refuse_if
from shardline.server.service import Service
from shardline.server.sse import Events

MAX_ANSWERS = 1024
"""The most answers of `generate_responses`."""

T = TypeVar("T")

_ADDED = ("content", "reasoning", "reasoning_content", "text", "token_ids", "tool_calls")
"""Fields of which a stream's events have parts."""

_UNUSED: dict[str, Any] = dict.fromkeys(("stream", "stream_options", "return_metrics", "logits_digest", "echo"))
"""Fields of a rendered request whose answer is not in tokens."""

_NO_SCORE = TokenLogprobs(0.0, 1, [], [])
"""In place of log probabilities that are not there."""


class _Score(RequestModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    token_id: int
    logprob: float
    rank: int | None = None


class _TokenScore(_Score):
    top_logprobs: list[_Score] = Field(default_factory=list)


class _Scores(RequestModel):
    content: list[_TokenScore] | None = None


class _Choice(RequestModel):
    """A choice of an answer or of a chunk."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    index: int
    token_ids: TokenIds | None = None
    logprobs: _Scores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def scores(self, most: int | None) -> list[TokenLogprobs] | None:
        """The log probabilities of the tokens; `most`: how many tokens each position has; None: all that are there."""
        if self.logprobs is None or self.logprobs.content is None:
            return None
        scores = []
        for token in self.logprobs.content:
            top = sorted(token.top_logprobs, key=lambda one: one.rank or 0)[:most]  # the chosen token came first
            ids, ranks = [one.token_id for one in top], [one.rank or 0 for one in top]
            scores.append(TokenLogprobs(token.logprob, token.rank or 0, ids, [one.logprob for one in top], ranks))
        return scores


class _Usage(RequestModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Tokens(RequestModel):
    """An answer of /inference/v1/generate in the mode "tokens", or a chunk of one. Other fields may be passed on."""

    model_config = ConfigDict(extra="allow", frozen=True)

    request_id: Annotated[str, Field(max_length=1024)]
    choices: Annotated[list[_Choice], Field(max_length=MAX_CHOICES_PER_HTTP_REQUEST)]
    usage: _Usage | None = None
    prompt_token_ids: TokenIds | None = None


class StreamState(RequestModel):
    """What the client of a stream keeps for the next chunk."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    output_token_ids: TokenIds = Field(default_factory=list)
    output_chunk_lens: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """How the tokens came in chunks."""


class _Body(RequestModel):
    stream: bool | None = None
    model: str | None = None
    generate_chunk: _Tokens | None = None
    stream_state: StreamState | None = None

    def chunk(self) -> _Tokens:
        """The chunk of a stream.

        Raises:
            ApiError: 400, it is not there, it has several choices, or what came before it is malformed.
        """
        if self.generate_chunk is None:
            raise bad_request("'stream' needs 'generate_chunk'.", "generate_chunk", "missing_required_parameter")
        if len(self.generate_chunk.choices) > 1:
            raise bad_request(
                "'generate_chunk' must have at most one choice: each has its own state.", "generate_chunk"
            )
        state = self.stream_state or StreamState()
        if sum(state.output_chunk_lens) != len(state.output_token_ids):
            raise bad_request(
                "invalid stream_state: the lengths of its chunks are not those of its tokens", "stream_state"
            )
        return self.generate_chunk


class DerenderChatRequest(_Body):
    """The body of POST /v1/chat/completions/derender."""

    generate_response: _Tokens | None = None
    """The answer; a stream has `generate_chunk`, and `stream_state` of the last answer here."""
    prompt_tokens: int | None = None
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatRequest | None = None
    """What was rendered. It says which tools there are, and what the answer shows."""


class DerenderCompletionRequest(_Body):
    """The body of POST /v1/completions/derender."""

    generate_responses: Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_ANSWERS)] | None = None
    """The answers, one for each prompt."""
    prompt_tokens: int | list[int] | None = None
    """One for each answer; in a stream, one."""
    prompt_token_ids: TokenIds | list[TokenIds | None] | None = None
    """As `prompt_tokens`."""
    completion_request: CompletionRequest | None = None

    def counts(self, count: int) -> list[int | None]:
        """`prompt_tokens` of each answer.

        Raises:
            ApiError: 400, there are more or fewer than answers.
        """
        given = self.prompt_tokens
        return _one_each("prompt_tokens", given if isinstance(given, list) or given is None else [given], count)

    def prompts(self, count: int) -> list[list[int] | None]:
        """`prompt_token_ids` of each answer.

        Raises:
            ApiError: 400, there are more or fewer than answers.
        """
        given = cast("list[Any] | None", self.prompt_token_ids)
        if given and isinstance(given[0], int):
            given = [given]
        return _one_each("prompt_token_ids", given, count)


def _one_each(name: str, given: Sequence[T] | None, count: int) -> list[T | None]:
    if given is None:
        return [None] * count
    if len(given) != count:
        raise bad_request(f"{name} length ({len(given)}) must be that of generate_responses ({count}).", name)
    return list(given)


class DerenderedChunk(msgspec.Struct, frozen=True):
    """A chunk of a stream, and what its client sends with the next one."""

    chunk: dict[str, Any]
    stream_state: dict[str, Any]


@dataclass
class _Replayed:
    outputs: list[RequestOutput]


def _replayed(outputs: list[RequestOutput]) -> Generation:
    """In place of a generation, of which writers need only the outputs."""
    return cast("Generation", _Replayed(outputs))


class _Reader:
    """Reads the tokens of one prompt's choices as if an engine of this server had sent them."""

    def __init__(self, service: Service, request: PreparedRequest) -> None:
        self._state = RequestState(request, service.require_tokenizer())
        self._eos_ids = request.children[0].eos_token_ids
        self.output = self._state.output

    def add(self, place: int, ids: list[int], scores: list[TokenLogprobs] | None, end: _Choice | None) -> None:
        """Add tokens to a choice. `end`: how it ends; None: it goes on."""
        choice = self._state.choices[place]
        if choice.output.finished():  # a stop string has ended it
            return
        if choice.output.token_logprobs is not None:
            scores = [*(scores or ()), *[_NO_SCORE] * (len(ids) - len(scores or ()))]
        reason = None if end is None else end.finish_reason
        stop_id = None
        if end is not None and reason == "stop" and ids and not isinstance(end.stop_reason, str):
            stop_id = ids[-1] if end.stop_reason is not None or ids[-1] in self._eos_ids else None
        step = SequenceOutput(
            "", place, ids, scores, finish_reason=cast("FinishReason | None", reason), stop_token_id=stop_id
        )
        choice.add_output(step, 0.0)
        if end is not None and choice.output.finished():
            choice.output.stop_reason = end.stop_reason


def _prepare(
    service: Service,
    ids: Sequence[int] | None,
    params: SamplingParams,
    num_choices: int,
    has_scores: bool,
    shown: frozenset[int],
) -> _Reader:
    """A reader of the answer to a prompt; `ids` is None: the prompt is not known, and does not change the text."""
    unseen = [min(service.require_tokenizer().special_token_ids, default=0)]
    params = SamplingParams(
        n=max(1, num_choices),
        logprobs=0 if has_scores else None,
        stop=params.stop_strings,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
    try:
        request = service.llm.model.builder.build_from_ids(
            "derender", None, list(ids or unseen), params, shown_token_ids=shown
        )
    except ValueError as error:
        raise as_api_error(error, "prompt_token_ids") or bad_request(str(error)) from error
    return _Reader(service, request)


def _check_tokens(service: Service, ids: Sequence[int], scores: _Scores | None, where: str) -> None:
    """Refuse tokens that no answer of this model has.

    Raises:
        ApiError: 400.
    """
    builder, most = service.llm.model.builder, service.llm.model.max_model_len
    if len(ids) > most:
        raise bad_request(
            f"token_ids of {where} has {len(ids)} entries, more than max_model_len ({most}).", "token_ids"
        )
    if ids and not 0 <= min(ids) <= max(ids) < builder.vocab_size:
        raise bad_request(f"token_ids of {where} must be from 0 to {builder.vocab_size - 1}.", "token_ids")
    if scores is None or scores.content is None:
        return
    if len(scores.content) > len(ids):
        raise bad_request(f"logprobs.content length of {where} exceeds that of token_ids ({len(ids)}).", "logprobs")
    for token in scores.content:
        if 0 <= builder.max_logprobs < (count := len(token.top_logprobs)):
            raise bad_request(
                f"top_logprobs count ({count}) of {where} exceeds max_logprobs ({builder.max_logprobs}).", "logprobs"
            )
        _check_tokens(service, [token.token_id, *(one.token_id for one in token.top_logprobs)], None, where)


def _read_whole(service: Service, answer: _Tokens, reader: _Reader, most_scores: int | None) -> RequestOutput:
    """The output of one prompt.

    Raises:
        ApiError: 400, a choice has no tokens, or tokens that no answer has.
    """
    for place, choice in enumerate(answer.choices):
        where = f"choice {choice.index}"
        if not choice.token_ids:
            raise bad_request(f"{where} has no token_ids.", "token_ids")
        _check_tokens(service, choice.token_ids, choice.logprobs, where)
        ended = choice if choice.finish_reason else choice.model_copy(update={"finish_reason": "stop"})
        reader.add(place, list(choice.token_ids), choice.scores(most_scores), ended)
    return reader.output


def _read_chunk(
    service: Service, body: _Body, chunk: _Tokens, reader: _Reader, events: Events, most_scores: int | None
) -> bytes:
    """The events of a chunk, after all before it.

    Raises:
        ApiError: 400, there are tokens that no answer has.
    """
    state = body.stream_state or StreamState()
    _check_tokens(service, state.output_token_ids, None, "stream_state")
    update = (0, reader.output)
    begun, start = next(events), 0
    for length in state.output_chunk_lens:
        reader.add(0, state.output_token_ids[start : start + length], None, None)
        events.send(update)
        start, begun = start + length, b""
    for choice in chunk.choices:
        _check_tokens(service, choice.token_ids or (), choice.logprobs, f"choice {choice.index}")
        reader.add(0, list(choice.token_ids or ()), choice.scores(most_scores), choice)
        begun += events.send(update)
    return begun


def _join_events(events: bytes) -> dict[str, Any]:
    """One chunk of what several events add."""
    joined: dict[str, Any] = {}
    for line in filter(None, events.split(b"\n\n")):
        event = msgspec.json.decode(line.removeprefix(b"data: "))
        joined = _add_fields(joined, event) if joined else event
    return joined


def _add_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    joined = dict(before)
    for name, value in after.items():
        known = joined.get(name)
        if name in ("delta", "logprobs") and isinstance(known, dict) and isinstance(value, dict):
            joined[name] = _add_fields(known, value)
        elif name == "choices" and known and value:
            joined[name] = [_add_fields(known[0], value[0])]
        elif (
            name in ("content", "reasoning", "reasoning_content", "text", "token_ids", "tool_calls") and known and value
        ):
            joined[name] = known + value
        elif value is not None:
            joined[name] = value
    return joined


def _answer_whole(
    answers: Sequence[_Tokens],
    whole: dict[str, Any],
    prompt_tokens: int,
    response: type[ChatResponse | CompletionResponse],
) -> Response:
    """The answer for the client; what is not of tokens is as it came, if all answers have the same."""
    first, *others = [answer.model_extra or {} for answer in answers]
    for name in response.__struct_fields__:
        if whole.get(name) is None and all(other.get(name) == first.get(name) for other in others):
            whole[name] = first.get(name)
    whole["usage"] = _usage(whole["usage"], prompt_tokens, sum(map(_count_tokens, answers)))
    return Response(msgspec.json.encode(whole), media_type="application/json")


def _answer_chunk(
    service: Service, body: _Body, chunk: _Tokens, kind: str, events: bytes, prompt_tokens: int | None
) -> Response:
    """The chunk for the client, with the state of the next one. `kind`: what the chunk is."""
    nothing: dict[str, Any] = {"delta": {}} if kind == "chat.completion.chunk" else {"text": ""}
    event: dict[str, Any] = {
        "id": chunk.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": service.name_of(body.model),
        "system_fingerprint": service.llm.model.fingerprint,
        "choices": [{**nothing, "logprobs": None, "finish_reason": None} for _ in chunk.choices],
    }
    event = _add_fields(event, _join_events(events))
    state = body.stream_state or StreamState()
    ids, lengths = list(state.output_token_ids), list(state.output_chunk_lens)
    for choice, written in zip(chunk.choices, event["choices"], strict=True):
        written["index"] = choice.index
        if choice.token_ids:
            ids += choice.token_ids
            lengths.append(len(choice.token_ids))
    if chunk.usage is not None:
        count = prompt_tokens if prompt_tokens is not None else chunk.usage.prompt_tokens or 0
        event["usage"] = _usage({}, count, chunk.usage.completion_tokens or 0)
    if metrics := (chunk.model_extra or {}).get("metrics"):
        event["metrics"] = metrics
    derendered = DerenderedChunk(event, {"output_token_ids": ids, "output_chunk_lens": lengths})
    return Response(msgspec.json.encode(derendered), media_type="application/json")


def _place(written: dict[str, Any], index: int, choice: _Choice) -> None:
    """Give a choice its index, and no log probabilities of tokens that came without."""
    written["index"] = index
    if written.get("logprobs") and choice.logprobs is not None:
        count = len(choice.logprobs.content or ())
        logprobs: dict[str, Any] = written["logprobs"]
        written["logprobs"] = {n: v[:count] if isinstance(v, list) else v for n, v in logprobs.items()}


def _missing(name: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")


def _usage(known: dict[str, Any], prompt: int, completion: int) -> dict[str, Any]:
    return {**known, "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _count_prompt(given: int | None, ids: Sequence[int] | None) -> int:
    return len(ids or ()) if given is None else given


def _count_tokens(answer: _Tokens) -> int:
    return sum(len(choice.token_ids or ()) for choice in answer.choices)


def derender_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions/derender", responses=json_answers(ChatResponse))
    async def derender_chat(body: DerenderChatRequest) -> Response:
        """A chat completion of tokens. With `stream`, one chunk of it, and the state of the next one."""
        service.require_model(body.model)
        answer = body.chunk() if body.stream else body.generate_response
        if answer is None:
            raise _missing("generate_response")
        ids = answer.prompt_token_ids if body.prompt_token_ids is None else body.prompt_token_ids
        _check_tokens(service, ids or (), None, "the prompt")
        reads = service.chat.reasoning_parser is not None or service.config.tool_call_parser != "auto"
        refuse_if(
            reads and body.chat_request is None,
            "chat_request",
            "'chat_request' is required where answers are parsed: it says what may be in them.",
        )
        refuse_if(
            reads and bool(body.stream) and body.prompt_token_ids is None,
            "prompt_token_ids",
            "'prompt_token_ids' are required where answers are parsed: a prompt may end inside reasoning.",
        )
        request = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user", "content": ""}]})
        most = request.top_logprobs if request.logprobs else None
        has_scores = any(choice.logprobs is not None for choice in answer.choices)
        request = request.model_copy(
            update={**_UNUSED, "n": max(1, len(answer.choices)), "logprobs": has_scores, "model": body.model}
            | ({"kv_transfer_params": TransferParams(prompt_token_ids=list(ids))} if ids else {})
        )
        if body.chat_request is None:
            form, params = AnswerFormat(service.require_tokenizer(), ""), SamplingParams()
        else:
            chat = await prepare_chat(service, request)
            form, params, ids = chat.answer_format, chat.params, ids or chat.token_ids
        reader = _prepare(service, ids, params, len(answer.choices), has_scores, form.shown_token_ids)
        writer = ChatWriter(service, request, answer.request_id, form)
        if body.stream:
            events = writer.write_chunks(_replayed([reader.output]))
            begun = await asyncio.to_thread(_read_chunk, service, body, answer, reader, events, most)
            return _answer_chunk(service, body, answer, "chat.completion.chunk", begun, body.prompt_tokens)

        def write() -> bytes:
            _read_whole(service, answer, reader, most)
            return writer.write_whole([reader.output])

        whole: dict[str, Any] = msgspec.json.decode(await asyncio.to_thread(write))
        for written, choice in zip(whole["choices"], answer.choices, strict=True):
            _place(written, choice.index, choice)
        return _answer_whole([answer], whole, _count_prompt(body.prompt_tokens, body.prompt_token_ids), ChatResponse)

    @router.post("/v1/completions/derender", responses=json_answers(CompletionResponse))
    async def derender_completion(body: DerenderCompletionRequest) -> Response:
        """A completion of tokens. With `stream`, one chunk of it, and the state of the next one."""
        service.require_model(body.model)
        answers = [body.chunk()] if body.stream else body.generate_responses
        if answers is None:
            raise _missing("generate_responses")
        prompts, counts = body.prompts(len(answers)), body.counts(len(answers))
        request = body.completion_request or CompletionRequest.model_validate({"prompt": ""})
        most = request.logprobs
        has_scores = any(choice.logprobs is not None for answer in answers for choice in answer.choices)
        num_choices = max(1, *(len(answer.choices) for answer in answers))
        request = request.model_copy(
            update={**_UNUSED, "n": num_choices, "logprobs": 0 if has_scores else None, "best_of": None}
            | {"model": body.model, "prompt_embeds": None}
        )
        params = request.sampling_params(max_tokens=None, logprobs=None, defaults=service.sampling_defaults)
        readers = []
        for answer, ids in zip(answers, prompts, strict=True):
            _check_tokens(service, ids or (), None, "the prompt")
            ids = answer.prompt_token_ids if ids is None else ids
            readers.append(_prepare(service, ids, params, len(answer.choices), has_scores, frozenset()))
        writer = CompletionWriter(service, request, answers[0].request_id, [""] * len(answers))
        if body.stream:
            events = writer.write_chunks(_replayed([readers[0].output]))
            begun = await asyncio.to_thread(_read_chunk, service, body, answers[0], readers[0], events, most)
            return _answer_chunk(service, body, answers[0], "text_completion", begun, counts[0])

        def write() -> bytes:
            for answer, reader in zip(answers, readers, strict=True):
                _read_whole(service, answer, reader, most)
            return writer.write_whole([reader.output for reader in readers])

        whole: dict[str, Any] = msgspec.json.decode(await asyncio.to_thread(write))
        choices = [choice for answer in answers for choice in answer.choices]
        for index, (written, choice) in enumerate(zip(whole["choices"], choices, strict=True)):
            _place(written, index, choice)
        return _answer_whole(answers, whole, sum(map(_count_prompt, counts, prompts)), CompletionResponse)

    return router
