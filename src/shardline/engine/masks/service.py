"""The service of a mask worker: it follows the grammars of sequences, and computes which tokens may come next."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shardline.checkpoints.gguf.header import read_header
from shardline.checkpoints.gguf.names import is_gguf
from shardline.checkpoints.gguf.tokenizer import read_vocabulary
from shardline.sandbox.nursery import Service
from shardline.structured.compiler import GrammarCompiler, Matcher

_GUESS_SECONDS = 0.002
"""Processor time after which a job tries no further guess."""


class MaskJob(msgspec.Struct, frozen=True, array_like=True):
    """Tell which tokens a sequence may have next."""

    key: int
    """Of the sequence; a new one, or one that a job of this worker has started."""
    token_ids: list[int]
    """What it has got since its last job; all of its output if it starts."""
    guesses: list[int] = []
    """What may follow these."""
    grammar: str = ""
    """Not empty: the sequence starts with this grammar."""
    end_ids: tuple[int, ...] = ()
    """The tokens that end its answer, if it starts."""
    drops: tuple[int, ...] = ()
    """Sequences that have ended."""


class MaskAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What may come next."""

    words: bytes = b""
    """The tokens that are allowed next, and after each of the guesses, as bits in words of 32; empty: there is no next
    token."""
    guesses: list[int] = []
    """Those of the job up to the first that is not allowed, ends the answer, or comes too late."""
    finished: bool = False
    """Whether the grammar is at its end, so that the sequence ends."""
    error: str = ""
    """Why the sequence cannot go on; empty: it can."""
    seconds: float = 0.0
    """Processor time of the job."""
    mask_seconds: float = 0.0
    """Processor time of the next token's mask alone, without compiling or reading."""


def open_service(tokenizer_file: str) -> Service:
    """Masks over the vocabulary of a tokenizer.json, or of a GGUF file."""
    file = Path(tokenizer_file)
    try:
        source = read_vocabulary(read_header(file)).tokenizer if is_gguf(file) else file.read_bytes()
        masks = _Masks(GrammarCompiler(source))
    except (ValueError, OSError) as error:
        refusal = msgspec.msgpack.encode(MaskAnswer(error=str(error)))
        return lambda body: refusal
    decoder, encoder = msgspec.msgpack.Decoder(MaskJob), msgspec.msgpack.Encoder()
    return lambda body: encoder.encode(masks.answer(decoder.decode(body)))


class _Masks:
    """The sequences of one worker."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._sequences: dict[int, tuple[Matcher, tuple[int, ...]]] = {}

    def answer(self, job: MaskJob) -> MaskAnswer:
        """Do one job."""
        began = time.process_time()
        for key in job.drops:
            self._sequences.pop(key, None)
        if job.grammar:
            self._sequences[job.key] = self._compiler.start_grammar(job.grammar), job.end_ids
        matcher, ends = self._sequences[job.key]
        for token_id in job.token_ids:
            matcher.append_token(token_id, is_end=token_id in ends)
        if matcher.is_finished:
            return MaskAnswer(finished=True, seconds=time.process_time() - began)
        read = time.process_time()
        try:
            masks = [_find_words(matcher, ends)]
        except ValueError as error:
            return MaskAnswer(error=str(error))
        now = time.process_time()
        mask_seconds, latest = now - read, began + _GUESS_SECONDS
        guesses: list[int] = []
        for guess in job.guesses:
            if guess in ends or not _has_bit(masks[-1], guess) or time.process_time() > latest:
                break
            matcher.append_token(guess, is_end=False)
            guesses.append(guess)
            if matcher.is_finished:
                break
            try:
                masks.append(_find_words(matcher, ends))
            except ValueError:
                break
        matcher.take_back(len(guesses))
        del guesses[len(masks) - 1 :]
        words = b"".join(mask.tobytes() for mask in masks)
        return MaskAnswer(words, guesses, seconds=now - began, mask_seconds=mask_seconds)


def _find_words(matcher: Matcher, ends: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """The tokens that may come next, as bits, with those that end the answer.

    Raises:
        ValueError: see `Matcher.find_allowed`.
    """
    words, may_end = matcher.find_allowed()
    if ends:
        words = np.pad(words, (0, max(0, max(ends) // 32 + 1 - len(words))))
    if may_end:
        for token_id in ends:
            words.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words


def _has_bit(words: npt.NDArray[np.int32], token_id: int) -> bool:
    return token_id >> 5 < len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)
