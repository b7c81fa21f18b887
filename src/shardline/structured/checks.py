"""The checks of grammars, in processes of their own: what a client writes may hold the compiler up or end it."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Any

import msgspec

from shardline.sampling_params import StructuredOutputsParams
from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.pool import Pool
from shardline.sandbox.worker import WorkerEnded
from shardline.structured.check_service import GRAMMAR, PARAMS, REFUSED
from shardline.structured.grammar import MAX_GRAMMAR_CHARS, check_size, is_larger

CHECK_SECONDS = 1.0
CHECK_BYTES = 256 << 20

_INLINE_CHARS = 4096
"""The longest schemas and texts that are encoded on the event loop."""
_MAX_KNOWN = 10_000
_MAX_KNOWN_CHARS = 2 << 20

_SANDBOX = Sandbox("shardline.structured.check_service", title="grammar check", memory=CHECK_BYTES)
_LIMITS = {
    Limit.TIME: f"it takes more than {CHECK_SECONDS:g} s to check; make it smaller or simpler",
    Limit.DEADLINE: f"it takes more than {CHECK_SECONDS:g} s to check, or the server is too busy to check it",
    Limit.MEMORY: f"it needs more than {CHECK_BYTES >> 20} MiB to check; make it smaller or simpler",
    Limit.STACK: "its rules or references are nested too deeply: the check needs more stack than there is",
    Limit.UNKNOWN: "the check of it ended unexpectedly",
}


class GrammarChecks:
    """Writes and checks grammars. Those that were asked for lately are known, refused ones too.

    The methods of coroutines are for one event loop at a time, the blocking one for any thread.
    """

    def __init__(self) -> None:
        self._pool = Pool(_SANDBOX)
        self._known: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        """By the digest of a job: the grammar, and why it is refused (empty: it is taken)."""
        self._num_chars = 0

    async def start(self) -> None:
        """Have a process ready, so that the first check need not wait for one."""
        await self._pool.start()

    async def write_grammar(self, params: StructuredOutputsParams) -> str:
        """The grammar of a user's parameters; it can be compiled.

        Raises:
            ValueError: it cannot; the message says what it lacks, or which limit the check has hit.
        """
        if is_larger(_sources(params), _INLINE_CHARS):
            return await self._run(await asyncio.to_thread(_encode_params, params))
        return await self._run(_encode_params(params))

    async def check_grammar(self, grammar: str) -> None:
        """Refuse a grammar that cannot be compiled.

        Raises:
            ValueError: the message says what it lacks, or which limit the check has hit.
        """
        await self._run(_encode_grammar(grammar))

    def write_grammar_blocking(self, params: StructuredOutputsParams) -> str:
        """As `write_grammar`, for threads."""
        job = _encode_params(params)
        key = _digest(job)
        if key in self._known:
            return self._answer(key)
        try:
            answer = self._pool.run_blocking(job, CHECK_SECONDS)
        except WorkerEnded as ended:
            answer = _explain(ended)
        self._note(key, answer)
        return self._answer(key)

    def close(self) -> None:
        """End the processes; checks that run are refused."""
        self._pool.close()

    async def _run(self, job: bytes) -> str:
        key = _digest(job)
        if key not in self._known:
            try:
                answer = await self._pool.run(job, CHECK_SECONDS)
            except WorkerEnded as ended:
                answer = _explain(ended)
            self._note(key, answer)
        return self._answer(key)

    def _answer(self, key: bytes) -> str:
        self._known.move_to_end(key)
        grammar, reason = self._known[key]
        if reason:
            raise ValueError(reason)
        return grammar

    def _note(self, key: bytes, answer: bytes) -> None:
        text = answer[1:].decode()
        self._known[key] = ("", text) if answer[:1] == REFUSED else (text, "")
        self._num_chars += len(text)
        while len(self._known) > _MAX_KNOWN or (self._num_chars > _MAX_KNOWN_CHARS and len(self._known) > 1):
            grammar, reason = self._known.popitem(last=False)[1]
            self._num_chars -= len(grammar) + len(reason)


def _explain(ended: WorkerEnded) -> bytes:
    """The refusal of a grammar whose check has hit a limit.

    Raises:
        ValueError: the next check may end otherwise.
    """
    reason = _LIMITS[ended.limit]
    if ended.limit in (Limit.DEADLINE, Limit.UNKNOWN):
        raise ValueError(reason)
    return REFUSED + reason.encode()


def _sources(params: StructuredOutputsParams) -> list[Any]:
    return [params.json, params.regex, params.choice, params.grammar, params.structural_tag]


def _encode_params(params: StructuredOutputsParams) -> bytes:
    check_size(_sources(params))
    try:
        return PARAMS + msgspec.json.encode(params)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except TypeError as error:
        raise ValueError(f"structured_outputs is not JSON: {error}") from error


def _encode_grammar(grammar: str) -> bytes:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    return GRAMMAR + grammar.encode()


def _digest(job: bytes) -> bytes:
    return hashlib.blake2b(job, digest_size=16).digest()
