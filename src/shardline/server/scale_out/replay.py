"""Reads tokens that another server has generated as if an engine of this server had sent them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from shardline.api.output_processor import RequestState
from shardline.api.outputs import RequestOutput
from shardline.api.prompts import EncodedPrompt
from shardline.api.requests import PreparedRequest
from shardline.messages.request import FinishReason, SequenceOutput, TokenLogprobs
from shardline.sampling_params import SamplingParams
from shardline.server.errors import bad_request
from shardline.server.openai.engine_errors import as_api_error
from shardline.server.scale_out.derender_bodies import DerenderBody, Scores, StreamState, TokenAnswer, TokenChoice
from shardline.server.service import Service
from shardline.server.sse import Events

_ADDED = ("content", "reasoning", "reasoning_content", "text", "token_ids", "tool_calls")
"""Fields of which a stream's events have parts."""

_NO_SCORE = TokenLogprobs(0.0, 1, [], [])
"""In place of log probabilities that are not there."""


class TokenReader:
    """Reads the tokens of one prompt's choices as if an engine of this server had sent them."""

    def __init__(self, service: Service, request: PreparedRequest) -> None:
        self._state = RequestState(request, service.require_tokenizer())
        self._eos_ids = request.children[0].eos_token_ids
        self.output = self._state.output

    def add(self, place: int, ids: list[int], scores: list[TokenLogprobs] | None, end: TokenChoice | None) -> None:
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
        step = SequenceOutput("", ids, scores, finish_reason=cast("FinishReason | None", reason), stop_token_id=stop_id)
        choice.add_output(step, 0.0)
        if end is not None and choice.output.finished():
            choice.output.stop_reason = end.stop_reason


def open_reader(
    service: Service,
    ids: Sequence[int] | None,
    params: SamplingParams,
    num_choices: int,
    has_scores: bool,
    shown: frozenset[int],
) -> TokenReader:
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
        request = service.llm.model.builder.build_request(
            "derender", EncodedPrompt(list(ids or unseen)), params, shown_token_ids=shown
        )
    except ValueError as error:
        raise as_api_error(error, "prompt_token_ids") or bad_request(str(error)) from error
    return TokenReader(service, request)


def check_tokens(service: Service, ids: Sequence[int], scores: Scores | None, where: str) -> None:
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
        check_tokens(service, [token.token_id, *(one.token_id for one in token.top_logprobs)], None, where)


def read_whole(service: Service, answer: TokenAnswer, reader: TokenReader, most_scores: int | None) -> RequestOutput:
    """The output of one prompt.

    Raises:
        ApiError: 400, a choice has no tokens, or tokens that no answer has.
    """
    for place, choice in enumerate(answer.choices):
        where = f"choice {choice.index}"
        if not choice.token_ids:
            raise bad_request(f"{where} has no token_ids.", "token_ids")
        check_tokens(service, choice.token_ids, choice.logprobs, where)
        ended = choice if choice.finish_reason else choice.model_copy(update={"finish_reason": "stop"})
        reader.add(place, list(choice.token_ids), choice.scores(most_scores), ended)
    return reader.output


def read_chunk(
    service: Service,
    body: DerenderBody,
    chunk: TokenAnswer,
    reader: TokenReader,
    events: Events,
    most_scores: int | None,
) -> bytes:
    """The events of a chunk, after all before it.

    Raises:
        ApiError: 400, there are tokens that no answer has.
    """
    state = body.stream_state or StreamState()
    check_tokens(service, state.output_token_ids, None, "stream_state")
    update = (0, reader.output)
    begun, start = next(events), 0
    for length in state.output_chunk_lens:
        reader.add(0, state.output_token_ids[start : start + length], None, None)
        events.send(update)
        start, begun = start + length, b""
    for choice in chunk.choices:
        check_tokens(service, choice.token_ids or (), choice.logprobs, f"choice {choice.index}")
        reader.add(0, list(choice.token_ids or ()), choice.scores(most_scores), choice)
        begun += events.send(update)
    return begun


def join_events(events: bytes) -> dict[str, Any]:
    """One chunk of what several events add."""
    joined: dict[str, Any] = {}
    for line in filter(None, events.split(b"\n\n")):
        event = msgspec.json.decode(line.removeprefix(b"data: "))
        joined = add_fields(joined, event) if joined else event
    return joined


def add_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A chunk with what another one adds."""
    joined = dict(before)
    for name, value in after.items():
        known = joined.get(name)
        if name in ("delta", "logprobs") and isinstance(known, dict) and isinstance(value, dict):
            joined[name] = add_fields(known, value)
        elif name == "choices" and known and value:
            joined[name] = [add_fields(known[0], value[0])]
        elif name in _ADDED and known and value:
            joined[name] = known + value
        elif value is not None:
            joined[name] = value
    return joined
