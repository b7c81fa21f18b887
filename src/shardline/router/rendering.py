"""The token ids of prompts, which backends compute: what their caches hold is known by token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardline.router.fleet import Backend
from shardline.router.upstream import Header, UpstreamError
from shardline.routing.router import CHUNK_BYTES

_RENDERED = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses"})
_TOKENIZED = frozenset({b"/v1/chat/completions", b"/v1/completions"})
"""Paths whose bodies /tokenize takes as they are."""
_SECONDS = 2.0
_MOST_BYTES = 64 << 20


async def rendered_tokens(
    target: bytes, headers: list[Header], body: bytes, text: bytes, candidates: Sequence[Backend]
) -> list[int] | None:
    """The token ids of a request's first prompt, by `target`/render of the backend with the least to do, or where that
    does not exist by /tokenize.

    None: it is short, or nobody can say. The request then is judged by its `text`.
    """
    path = target.partition(b"?")[0]
    able = [backend for backend in candidates if backend.token_ways]
    if path not in _RENDERED or len(text) < CHUNK_BYTES or not able:
        return None
    backend = min(able, key=lambda one: one.num_requests)
    for way in list(backend.token_ways):
        if way == b"/tokenize" and path not in _TOKENIZED:
            continue
        status, rendered = await _ask(backend, path + way if way == b"/render" else way, headers, body)
        if status not in (401, 403, 404, 405, 501):
            return _token_ids(rendered) if status == 200 else None
        backend.token_ways = [one for one in backend.token_ways if one != way]
    return None


async def _ask(backend: Backend, target: bytes, headers: list[Header], body: bytes) -> tuple[int, bytes]:
    try:
        answer = await backend.upstream.send(b"POST", target, headers, body, _SECONDS)
        try:
            return answer.status, await answer.read_all(_SECONDS, _MOST_BYTES)
        finally:
            answer.close()
    except UpstreamError:
        return 0, b""  # its health check will find what is wrong


def _token_ids(rendered: bytes) -> list[int] | None:
    try:
        fields: Any = msgspec.json.decode(rendered)
        first = fields[0] if isinstance(fields, list) else fields
        return msgspec.convert(first["token_ids"] if "token_ids" in first else first["tokens"], list[int])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
