"""The folder of /v1/files and /v1/batches: what it holds survives the server, and is bounded.

`files/ID` has the content of a file and `files/ID.json` its description, without which it does not exist yet.
`batches/ID.json` is a batch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from shardline.config.fields import format_bytes
from shardline.server.errors import ApiError, bad_request

MAX_ENTRIES = 10_000
"""The most files, and the most batches, in a folder."""

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]
T = TypeVar("T", "FileObject", "Batch")

ENDED = frozenset({"failed", "completed", "cancelled"})


class FileObject(msgspec.Struct, kw_only=True):
    """A file, as OpenAI describes it. Times are Unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class RequestCounts(msgspec.Struct):
    """The requests of a batch: all, those that succeeded, and those that did not."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, kw_only=True):
    """Why a batch failed."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """All reasons."""

    object: str = "list"
    data: list[BatchError]


class ExpiresAfter(msgspec.Struct):
    """How long the files with the answers stay, counted from when they are made."""

    seconds: int
    anchor: str = "created_at"


class Batch(msgspec.Struct, kw_only=True):
    """A batch, as OpenAI describes it. Times are Unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def output_id(self) -> str:
        """The id that the file with its answers has or will have."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def errors_id(self) -> str:
        """The same of the file with its errors."""
        return f"file-{self.id.removeprefix('batch_')}-errors"


class StorageFull(ApiError):
    """The folder has no room."""

    def __init__(self, message: str) -> None:
        super().__init__(413, message, code="storage_full")


class BatchStore:
    """Files and batches in a folder, and what they are in memory.

    Args:
        folder: it is made, if it is missing.
        limit: bytes of all files together.

    Raises:
        ValueError: the folder cannot be used, or another server uses it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._files_folder, self._batches_folder = folder / "files", folder / "batches"
        self._limit = limit
        try:
            for path in (folder, self._files_folder, self._batches_folder):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "w")  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._files = _load(self._files_folder, FileObject)
            self._batches = _load(self._batches_folder, Batch)
            self._remove_unknown()
        except BlockingIOError as error:
            self.close()
            raise ValueError(f"--batch-dir {folder}: another server uses it; give each its own") from error
        except OSError as error:
            raise ValueError(f"--batch-dir {folder}: cannot be used ({error})") from error
        self.num_bytes = sum(path.stat().st_size for path in self._files_folder.glob("file-*") if not path.suffix)

    def close(self) -> None:
        """Let another server have the folder; may be called again."""
        self._lock.close()

    def path_of(self, file_id: str) -> Path:
        """Where the content of a file is. The id must be one that was made here."""
        return self._files_folder / file_id

    def find_file(self, file_id: str) -> FileObject:
        """A file.

        Raises:
            ApiError: 404.
        """
        self._drop_expired()
        file = self._files.get(file_id)
        if file is None:
            raise ApiError(404, f"No such File object: {file_id}", param="id", code="not_found")
        return file

    def files(self) -> list[FileObject]:
        """All files, newest first."""
        self._drop_expired()
        return list(reversed(self._files.values()))

    def add_file(self, file: FileObject) -> None:
        """Let a file exist whose content is there."""
        _save(self._files_folder / f"{file.id}.json", file)
        self._files[file.id] = file

    def delete_file(self, file_id: str) -> None:
        """Remove a file.

        Raises:
            ApiError: 404; 400, a batch still reads it.
        """
        self.find_file(file_id)
        for batch in self._batches.values():
            if batch.input_file_id == file_id and batch.status not in ENDED:
                raise bad_request(f"The batch {batch.id} reads this file: cancel it first.", "file_id", "file_in_use")
        self._remove_file(file_id)

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are about to be written to a file.

        Raises:
            StorageFull: there is no room for them.
        """
        if self.num_bytes + num_bytes > self._limit:
            self._drop_expired()
        if self.num_bytes + num_bytes > self._limit:
            raise StorageFull(
                f"The server keeps {format_bytes(self._limit)} of files (--batch-dir-bytes), and this is more than is "
                "left: delete files that nobody needs."
            )
        self.num_bytes += num_bytes

    @contextlib.contextmanager
    def writing(self) -> Iterator[_Upload]:
        """A new file; it goes if the block fails.

        Raises:
            StorageFull: there are too many files.
        """
        if len(self._files) >= MAX_ENTRIES:
            raise StorageFull(f"The server keeps {MAX_ENTRIES} files: delete some that nobody needs.")
        file_id = f"file-{uuid.uuid4().hex}"
        upload = _Upload(self, file_id)
        try:
            yield upload
        except BaseException:
            self._remove_file(file_id)
            raise
        finally:
            upload.close()

    def _remove_file(self, file_id: str) -> None:
        self._files.pop(file_id, None)
        self._description(file_id).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.num_bytes -= self.path_of(file_id).stat().st_size
            self.path_of(file_id).unlink()

    def _description(self, file_id: str) -> Path:
        return self._files_folder / f"{file_id}.json"

    def _drop_expired(self) -> None:
        now = time.time()
        used = {batch.input_file_id for batch in self._batches.values() if batch.status not in ENDED}
        expired = [file.id for file in self._files.values() if file.expires_at is not None and file.expires_at < now]
        for file_id in expired:
            if file_id not in used:
                self._remove_file(file_id)

    def _remove_unknown(self) -> None:
        """Remove uploads that were not finished. Unfinished batches keep the answers that they have."""
        kept = set(self._files)
        for batch in self._batches.values():
            if batch.status not in ENDED:
                kept |= {batch.output_id, batch.errors_id}
        for path in self._files_folder.iterdir():
            if path.name.removesuffix(".json") not in kept:
                path.unlink()

    def find_batch(self, batch_id: str) -> Batch:
        """A batch.

        Raises:
            ApiError: 404.
        """
        batch = self._batches.get(batch_id)
        if batch is None:
            raise ApiError(404, f"No batch found with id '{batch_id}'.", param="batch_id", code="not_found")
        return batch

    def batches(self) -> list[Batch]:
        """All batches, newest first."""
        return list(reversed(self._batches.values()))

    def save_batch(self, batch: Batch) -> None:
        """Keep a batch as it is now. If there are too many, the oldest one that has ended is forgotten.

        Raises:
            StorageFull: all of them are unfinished.
        """
        if batch.id not in self._batches and len(self._batches) >= MAX_ENTRIES:
            oldest = next((old for old in self._batches.values() if old.status in ENDED), None)
            if oldest is None:
                raise StorageFull(f"{MAX_ENTRIES} batches have not ended yet: wait for one of them, or cancel some.")
            del self._batches[oldest.id]
            (self._batches_folder / f"{oldest.id}.json").unlink(missing_ok=True)
        _save(self._batches_folder / f"{batch.id}.json", batch)
        self._batches[batch.id] = batch


class _Upload:
    """A file that is being written."""

    def __init__(self, store: BatchStore, file_id: str) -> None:
        self.file_id = file_id
        self.num_bytes = 0
        self._store = store
        self._file = open(store.path_of(file_id), "wb")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            StorageFull: there is no room.
        """
        self._store.reserve(len(data))
        self._file.write(data)
        # What was counted must be in the file, since it is its size that is taken off.
        self._file.flush()
        self.num_bytes += len(data)

    def close(self) -> None:
        """End writing; may be called again."""
        self._file.close()


def _load(folder: Path, kind: type[T]) -> dict[str, T]:
    """All objects of a folder by their ids, oldest first.

    Raises:
        OSError: one cannot be read.
    """
    found = []
    for path in folder.glob("*.json"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except msgspec.DecodeError as error:
            raise OSError(f"{path}: {error}") from error
    return {entry.id: entry for entry in sorted(found, key=lambda entry: (entry.created_at, entry.id))}


def _save(path: Path, entry: FileObject | Batch) -> None:
    """Write an object so that a crash leaves the old one or the new one."""
    written = path.with_suffix(".tmp")
    written.write_bytes(msgspec.json.encode(entry))
    os.replace(written, path)
