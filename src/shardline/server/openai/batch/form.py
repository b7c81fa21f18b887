"""Uploads: multipart/form-data that goes to a file as it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from email.message import Message
from email.parser import HeaderParser

from shardline.server.errors import bad_request

MAX_FIELD_BYTES = 64 << 10
MAX_HEADER_BYTES = 16 << 10
MAX_PARTS = 32
MAX_FILENAME_CHARS = 255


class UploadForm:
    """The fields of a form, and the name of its file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None: the form has no file."""


async def read_form(content_type: str, chunks: AsyncIterator[bytes], write: Callable[[bytes], None]) -> UploadForm:
    """Read a form. The content of its field `file` goes to `write`, in pieces.

    Raises:
        ApiError: 400, the body is no such form; and what `write` raises.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise bad_request("The body must be a form with a file: Content-Type: multipart/form-data; boundary=….")
    if not boundary.isascii() or len(boundary) > 200:
        raise bad_request("The boundary of the form must be short and ASCII.")
    body = _Body(chunks)
    mark = b"\r\n--" + boundary.encode()
    body.push(b"\r\n")  # so that the first mark looks like all others
    await body.read_until(mark, lambda _: None)
    form = UploadForm()
    for _ in range(MAX_PARTS):
        if await body.read_exactly(2) == b"--":
            await body.skip_rest(MAX_HEADER_BYTES)
            return form
        await _read_part(form, body, mark, write)
    raise bad_request(f"The form has more than {MAX_PARTS} parts.")


async def _read_part(form: UploadForm, body: _Body, mark: bytes, write: Callable[[bytes], None]) -> None:
    # Clients send names in UTF-8, as browsers do.
    headers = HeaderParser().parsestr((await body.read_text(b"\r\n\r\n", MAX_HEADER_BYTES)).decode(errors="replace"))
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise bad_request("A part of the form has no name.")
    filename = headers.get_filename()
    if name == "file":
        if filename is None or form.filename is not None:
            raise bad_request("The form must have one file, in the field 'file'.", "file")
        form.filename = _plain_name(filename)
        await body.read_until(mark, write)
        return
    try:
        form.fields[name] = (await body.read_text(mark, MAX_FIELD_BYTES)).decode()
    except UnicodeDecodeError as error:
        raise bad_request(f"The field '{name}' is not UTF-8.", name) from error


def _plain_name(filename: str) -> str:
    """The last part of a path, without what is no text."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in last if letter.isprintable())[:MAX_FILENAME_CHARS] or "file"


class _Body:
    """The bytes of a body that have arrived and are not read yet."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._unread = b""

    def push(self, data: bytes) -> None:
        """Put bytes in front."""
        self._unread = data + self._unread

    async def read_until(self, mark: bytes, write: Callable[[bytes], None]) -> None:
        """Give what precedes `mark` to `write`, and go behind the mark."""
        while (position := self._unread.find(mark)) < 0:
            kept = len(self._unread) - len(mark) + 1  # the mark may have begun
            if kept > 0:
                write(self._unread[:kept])
                self._unread = self._unread[kept:]
            await self._receive()
        write(self._unread[:position])
        self._unread = self._unread[position + len(mark) :]

    async def read_text(self, mark: bytes, max_bytes: int) -> bytes:
        """What precedes `mark`, which must be short."""
        parts: list[bytes] = []

        def keep(part: bytes) -> None:
            parts.append(part)
            if sum(map(len, parts)) > max_bytes:
                raise bad_request(f"A part of the form has more than {max_bytes} bytes where little is expected.")

        await self.read_until(mark, keep)
        return b"".join(parts)

    async def read_exactly(self, count: int) -> bytes:
        """The next `count` bytes."""
        while len(self._unread) < count:
            await self._receive()
        text, self._unread = self._unread[:count], self._unread[count:]
        return text

    async def skip_rest(self, max_bytes: int) -> None:
        """Read what follows the form: a client whose bytes are not read may lose its answer."""
        size = len(self._unread)
        async for chunk in self._chunks:
            size += len(chunk)
            if size > max_bytes:
                raise bad_request("Something follows the end of the form.")

    async def _receive(self) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is None:
            raise bad_request("The form has no end.")
        self._unread += chunk
