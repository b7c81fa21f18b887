"""The growing output of a batch: a line for each answer, in the order of the requests, so that a run can be resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec

from shardline.server.openai.batch.lines import Answer, Line, NoRequest

_START = b'{"id":"batch_req_'
"""How each line begins."""


class OtherAnswers(ValueError):
    """A file has answers that belong to other requests or to another model."""


class _StoredError(msgspec.Struct):
    code: str | None = None


class _Stored(msgspec.Struct):
    id: str
    error: _StoredError | None = None


class _StoredAnswers:
    """The answers that a file has, in order. A last line that was not written whole is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_ok = self.num_failed = self.num_broken = 0
        """Of those that were taken."""
        self._answers = self._read()
        self._next = next(self._answers, None)

    @property
    def next_id(self) -> str | None:
        """The id of the next one; None: there is none."""
        return None if self._next is None else self._next.id

    def take(self) -> None:
        """Count the next one, and go on."""
        assert self._next is not None
        error = self._next.error
        self.num_ok += error is None
        self.num_failed += error is not None
        self.num_broken += error is not None and error.code == NoRequest.CODE
        self._next = next(self._answers, None)

    def _read(self) -> Iterator[_Stored]:
        if not self.path.is_file():
            return
        with open(self.path, "rb") as file:
            position = 0
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    if text[: len(_START)] != _START[: len(text)]:  # not ours: it must not be lost
                        raise OtherAnswers(f"line {number} of {self.path} is no answer of a batch")
                    os.truncate(self.path, position)
                    return
                position += len(text)
                try:
                    yield msgspec.json.decode(text, type=_Stored)
                except msgspec.DecodeError as error:
                    raise OtherAnswers(f"line {number} of {self.path} is no answer of a batch") from error


class AnswerLog:
    """Answers in one file, or in two: `errors` has those to requests that failed.

    Whatever is written goes on behind what the files have. `before_write` is called with the number of bytes that are
    about to be written, and may raise. `errors_in_body`: see `Answer.encode`.
    """

    def __init__(
        self,
        output: Path,
        errors: Path | None = None,
        *,
        errors_in_body: bool = False,
        before_write: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self.num_ok = self.num_failed = 0
        """Answers in both files."""
        self.num_broken = 0
        """Answers to lines that were no requests."""
        self._output_path, self._errors_path = output, errors
        self._errors_in_body = errors_in_body
        self._before_write = before_write
        self._output: BinaryIO | None = None
        self._errors: BinaryIO | None = None

    @property
    def num_answers(self) -> int:
        """The number of all answers."""
        return self.num_ok + self.num_failed

    def skip_answered(self, lines: Iterator[Line], fingerprint: str) -> Iterator[Line]:
        """The lines that are not answered yet; `fingerprint` is the model's.

        Raises:
            OtherAnswers: the files have answers to other lines.
        """
        stored = [_StoredAnswers(path) for path in (self._output_path, self._errors_path) if path is not None]
        rest: list[Line] = []
        for line in lines:
            answer_id = line.answer_id(fingerprint)
            file = next((file for file in stored if file.next_id == answer_id), None)
            if file is None:
                rest.append(line)
                break
            file.take()
        for file in stored:
            if file.next_id is not None:
                number = file.num_ok + file.num_failed + 1
                raise OtherAnswers(
                    f"line {number} of {file.path} is the answer to another request, or of another model"
                )
        self.num_ok = stored[0].num_ok
        self.num_failed = stored[0].num_failed + sum(file.num_ok + file.num_failed for file in stored[1:])
        self.num_broken = sum(file.num_broken for file in stored)
        return chain(rest, lines)

    def open(self) -> None:
        """Open the files to append."""
        # Without buffers: on a full disk, closing a file would fail again.
        self._output = open(self._output_path, "ab", 0)  # noqa: SIM115
        self._errors = None if self._errors_path is None else open(self._errors_path, "ab", 0)  # noqa: SIM115

    def append(self, answer: Answer) -> None:
        """Write the next answer; it is in the file when this returns."""
        assert self._output is not None
        text = answer.encode(errors_in_body=self._errors_in_body)
        self._before_write(len(text))
        file = self._output if answer.is_ok or self._errors is None else self._errors
        while text:
            text = text[file.write(text) :]
        self.num_ok += answer.is_ok
        self.num_failed += not answer.is_ok
        self.num_broken += not answer.is_request

    def close(self) -> None:
        """Close the files; may be called again."""
        for file in (self._output, self._errors):
            if file is not None:
                file.close()
