"""The lines of batch files, as OpenAI and vLLM write them: requests in the input, answers in the output."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import msgspec
import numpy as np

from shardline.server.errors import ApiError, bad_request

_BOM = b"\xef\xbb\xbf"
_SKIP_BYTES = 1 << 20
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.){0,512}")')
_MAX_SHOWN_URL = 100
_MAX_SHOWN_IDS = 5
_MAX_SHOWN_LINES = 5


class _Named(msgspec.Struct):
    custom_id: str


class RepeatedIds(ValueError):
    """Several requests of a file have one custom_id. `line` is the second one's."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Line:
    """One line of an input file that is not blank."""

    number: int
    """From 1; blank lines count."""
    text: bytes
    """Without the line break. A line that is too long is cut."""
    is_too_long: bool = False

    def answer_id(self, fingerprint: str) -> str:
        """The id of its answer: the same whenever the line is answered by the same model."""
        digest = hashlib.sha256(b"%b\n%d\n%b" % (fingerprint.encode(), self.number, self.text))
        return f"batch_req_{digest.hexdigest()[:24]}"

    @property
    def custom_id(self) -> str:
        """The request's own id, even if the line is broken behind it; without one, the number of the line."""
        with contextlib.suppress(ValueError, RecursionError):
            return msgspec.json.decode(self.text, type=_Named).custom_id
        match = _CUSTOM_ID.search(self.text)
        if match is not None:
            with contextlib.suppress(ValueError):
                return msgspec.json.decode(match[1], type=str)
        return f"line-{self.number}"


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[Line]:
    """The lines of a file; what is behind the first `max_bytes` of a line is not kept."""
    number = 0
    while text := file.readline(max_bytes + 1):
        number += 1
        is_too_long = len(text) > max_bytes and not text.endswith(b"\n")
        if is_too_long:
            while (rest := file.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
        text = text.removeprefix(_BOM).strip()
        if text:
            yield Line(number, text, is_too_long)


def count_requests(file: BinaryIO, max_bytes: int) -> int:
    """How many lines a file has; its position is then the start.

    Raises:
        RepeatedIds: two have one custom_id, so nobody could tell which answer is whose.
    """
    file.seek(0)
    # Hashes first: the ids of a large file would take too much memory.
    hashes = np.fromiter((hash(line.custom_id) for line in read_lines(file, max_bytes)), np.int64)
    values, counts = np.unique(hashes, return_counts=True)
    several = set(values[counts > 1][:_MAX_SHOWN_IDS].tolist())
    places: dict[str, list[int]] = {}
    file.seek(0)
    for line in read_lines(file, max_bytes) if several else ():
        if hash(line.custom_id) in several:
            places.setdefault(line.custom_id, []).append(line.number)
    file.seek(0)
    repeated = {name: lines for name, lines in places.items() if len(lines) > 1}
    if repeated:
        told = "; ".join(
            f"{name!r:.80} is in lines {', '.join(map(str, lines[:_MAX_SHOWN_LINES]))}"
            + (f" and {len(lines) - _MAX_SHOWN_LINES} more" if len(lines) > _MAX_SHOWN_LINES else "")
            for name, lines in repeated.items()
        )
        raise RepeatedIds(f"each custom_id must be unique: {told}", min(lines[1] for lines in repeated.values()))
    return len(hashes)


class BatchRequest(msgspec.Struct):
    """The object of an input line. Fields that OpenAI does not have are ignored."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class NoRequest(ApiError):
    """A line that is no request of a batch at all."""

    CODE: ClassVar[str] = "invalid_batch_line"

    def __init__(self, message: str) -> None:
        super().__init__(400, message, code=self.CODE)


class _Streamed(msgspec.Struct):
    stream: Any = None


def parse_request(line: Line, urls: Collection[str]) -> BatchRequest:
    """The request of a line, which may ask for one of `urls`.

    Raises:
        NoRequest: the line is broken.
        ApiError: 400, the request cannot be one of a batch.
    """
    if line.is_too_long:
        raise NoRequest(f"Line {line.number} is longer than {len(line.text)} bytes, the most that a request may have.")
    try:
        request = msgspec.json.decode(line.text, type=BatchRequest)
        streamed = msgspec.json.decode(request.body, type=_Streamed)
    except msgspec.ValidationError as error:
        raise NoRequest(f"Line {line.number} is not a request of a batch: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoRequest(f"Line {line.number} is not JSON: {error}.") from error
    if request.method != "POST":
        raise bad_request(f"The method of a batch's requests must be POST, got '{request.method[:20]}'.", "method")
    if request.url not in urls:
        raise bad_request(
            f"The URL {request.url[:_MAX_SHOWN_URL]} was used. Supported endpoints: {', '.join(sorted(urls))}.", "url"
        )
    if streamed.stream is True:
        raise bad_request("A request of a batch cannot be streamed: set 'stream' to false.", "stream")
    return request


class Response(msgspec.Struct):
    """What the endpoint answered; run-batch has no body of errors, as in vLLM."""

    status_code: int
    request_id: str
    body: msgspec.Raw | None


class OutputLine(msgspec.Struct):
    """The object of an output line."""

    id: str
    custom_id: str
    response: Response | None
    error: Any | None


@dataclass(frozen=True)
class Answer:
    """The answer to one line."""

    id: str
    custom_id: str
    status: int
    body: bytes
    """JSON of the endpoint's answer, or of an error."""
    is_request: bool = True
    """False: the line was none."""

    @property
    def is_ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status < 400

    def encode(self, *, errors_in_body: bool) -> bytes:
        """The output line, with its line break.

        `errors_in_body`: what an endpoint says of its error is the body, as at OpenAI; otherwise it is `error`, and
        there is no body, as in vLLM.
        """
        line = OutputLine(self.id, self.custom_id, Response(self.status, self.id, None), None)
        if self.is_ok or (errors_in_body and self.is_request):
            line.response = Response(self.status, self.id, msgspec.Raw(self.body))
        else:
            line.error = msgspec.json.decode(self.body)["error"]
            if errors_in_body:
                line.response = None
        return msgspec.json.encode(line) + b"\n"
