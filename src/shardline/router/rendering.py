"""The token ids of prompts, which backends compute: what their caches hold is known by token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardline.router.fleet import Backend
from shardline.router.upstream import Header, UpstreamError
from shardline.routing.router import CHUNK_BYTES

_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions", b"/v1/messages", b"/v1/responses"})
_SECONDS = 2.0
_MOST_BYTES = 64 << 20


async def rendered_tokens(
    target: bytes, headers: list[Header], body: bytes, text: bytes, candidates: Sequence[Backend]
) -> list[int] | None:
    """The token ids of a request's first prompt, by `target`/render of the backend with the least to do.

    None: it is short, or nobody can say. The request then is judged by its `text`.
    """
    path = target.partition(b"?")[0]
    able = [backend for backend in candidates if backend.renders]
    if path not in _PATHS or len(text) < CHUNK_BYTES or not able:
        return None
    backend = min(able, key=lambda one: one.num_requests)
    try:
        answer = await backend.upstream.send(b"POST", path + b"/render", headers, body, _SECONDS)
        try:
            if answer.status in (401, 403, 404, 405, 501):
                backend.renders = False
            rendered = await answer.read_all(_SECONDS, _MOST_BYTES) if answer.status == 200 else b""
        finally:
            answer.close()
    except UpstreamError:
        return None  # its health check will find what is wrong
    return _token_ids(rendered)


def _token_ids(rendered: bytes) -> list[int] | None:
    try:
        fields: Any = msgspec.json.decode(rendered)
        first = fields[0] if isinstance(fields, list) else fields
        return msgspec.convert(first["token_ids"], list[int])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
