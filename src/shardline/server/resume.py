"""Streams that can go on at another server: the field `resume` of a request, and the marks between its events.

A stream whose request has `resume` has marks: comments with the token ids of the events before them. Who knows all
marks of a stream that breaks off can ask another server to go on with it, by a `resume` that has what the marks said.
What came after the last mark comes again, and nothing else does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shardline.api.errors import RequestDiffers
from shardline.api.resume import PromptSoFar
from shardline.api.streams import RequestStream, watch_finish
from shardline.server.errors import ApiError, bad_request
from shardline.server.sse import Events

MARK = b": resume "
"""How a mark begins. JSON comes next, and an empty line. No event begins so, and clients ignore comments."""


class Resume(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The field `resume`, and the first mark of a stream. Without prompts, it only asks for marks."""

    contract: Annotated[str, Meta(max_length=64)] = ""
    """SHA-256 of the numeric contract of the server where the answer began."""
    id: Annotated[str, Meta(max_length=64)] = ""
    """Of the answer."""
    created: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    prompts: list[PromptSoFar] = []
    num_events: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    """Events up to the last mark, for streams that number them."""


class Progress(msgspec.Struct, array_like=True):
    """All marks of a stream but the first: what the events since the mark before have reported of one prompt."""

    prompt: int
    num_cached_tokens: int
    choices: list[tuple[int, list[int], bool]]
    """Of each choice that has changed: its index, its new token ids, and whether it has ended."""
    digests: list[list[str]] = []
    """For each of these choices, the digests of its new tokens' logits, if the request wants a receipt."""


def read_resume(value: Any) -> Resume | None:
    """The field's value; for pydantic.

    Raises:
        ValueError: it has another form.
    """
    if value is None or isinstance(value, Resume):
        return value
    try:
        resume = msgspec.convert(value, Resume)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    if resume.prompts and not (resume.contract and resume.id):
        raise ValueError("output so far needs 'contract' and 'id', as the first mark of the stream had them")
    if resume.id and not resume.prompts:
        raise ValueError("an 'id' needs the output so far: 'prompts'")
    resume.created = resume.created or int(time.time())
    return resume


def begin_resume(resume: Resume, request_id: str, own: str, num_prompts: int) -> Sequence[PromptSoFar]:
    """The output so far for each prompt; empty: the answer begins here, and `resume` gets the contract and the id.

    `own`: SHA-256 of this server's numeric contract.

    Raises:
        ApiError: 400, it is of another request; 409, this server would go on with other tokens.
    """
    resume.contract = resume.contract or own
    if resume.contract != own:
        raise ApiError(
            409,
            f"The answer has begun under the numeric contract {resume.contract!r}, and this server's is {own!r}: it "
            "would go on with other tokens.",
            param="resume",
            code="contract_differs",
        )
    if len(resume.prompts) not in (0, num_prompts):
        raise bad_request(f"'resume' has {len(resume.prompts)} prompts, and the request {num_prompts}.", "resume")
    resume.id = resume.id or request_id
    return resume.prompts


def request_differs(error: RequestDiffers) -> ApiError:
    """The answer to a request that goes on with the output of another one."""
    return ApiError(409, str(error), param="resume", code="request_differs")


def make_mark(value: Any) -> bytes:
    """A mark with this content."""
    return MARK + msgspec.json.encode(value) + b"\n\n"


def add_marks(events: Events, streams: Sequence[RequestStream], resume: Resume) -> Events:
    """The events of a stream with marks; `streams` are those of its prompts.

    `resume`: the first mark. If it has output so far, there is no first mark, and the events of this output are left
    out.
    """
    body = next(events)
    marked: list[dict[int, tuple[int, bool]]] = [{} for _ in streams]
    """For each prompt, by choice: the tokens that are marked, and whether its end is."""
    finished = watch_finish(streams)
    replayed = [stream.replayed for stream in streams]
    if any(output is not None for output in replayed):
        for index, output in enumerate(replayed):
            assert output is not None
            events.send((index, output))
            for choice in output.outputs:
                marked[index][choice.index] = len(choice.token_ids), choice.finished()
        body = b""
    else:
        resume.prompts = [stream.request.origin() for stream in streams]
        body = make_mark(resume) + body + (make_mark([]) if body else b"")
    while (update := (yield body)) is not None:
        body = events.send(update)
        if not body or finished():
            continue  # the next mark has these tokens, too; the end has none, since only here is known how it ends
        prompt, output = update
        changed: list[tuple[int, list[int], bool]] = []
        digests: list[list[str]] = []
        wants_receipt = streams[prompt].request.contract is not None
        for choice in output.outputs:
            state = len(choice.token_ids), choice.finished()
            before = marked[prompt].get(choice.index, (0, False))
            if state != before:
                marked[prompt][choice.index] = state
                changed.append((choice.index, choice.token_ids[before[0] :], state[1]))
                if wants_receipt:
                    digests.append((choice.digests or [])[before[0] :])
        body += make_mark(Progress(prompt, output.num_cached_tokens, changed, digests))
    yield events.send(None)
