"""One download of a model at a time, also by hosts that share a folder.

The lock is a file that its holder keeps rewriting. File locks of the operating system would need no rewriting, but on
some shared file systems (Lustre, GPFS, NFS mounts) every host gets them at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BEAT_SECONDS = 2.0
"""Seconds between two writes of the holder."""
STALE_SECONDS = 20.0
"""Seconds without a write after which the holder counts as dead."""
_POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def download_lock(file: Path, model: str) -> Iterator[None]:
    """Hold the lock `file` while `model` is downloaded; wait while another process holds it.

    Where the file cannot be written (a cache that is read-only), there is no lock.
    """
    name = f"{socket.gethostname()} (pid {os.getpid()})"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _acquire(file, name, model)
    except OSError as error:
        _log.debug("no lock for the download of %s: %s", model, error)
        yield
        return
    ended = threading.Event()
    writer = threading.Thread(target=_keep_writing, args=(file, name, ended), name="download-lock", daemon=True)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        file.unlink(missing_ok=True)


def _acquire(file: Path, name: str, model: str) -> None:
    """Create the lock file as soon as nobody holds it."""
    content, seen, told = None, 0.0, False
    while True:
        try:
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o664), "w") as created:
                created.write(_content(name, 0))
            return
        except FileExistsError:
            pass
        try:
            found = file.read_text(errors="replace")
        except FileNotFoundError:  # its holder has just ended
            continue
        now = time.monotonic()
        if found != content:
            content, seen = found, now
        elif now - seen > STALE_SECONDS:
            _remove_stale(file, found)
            continue
        if found and not told:
            told = True
            _log.info("%s is downloading %s; this process waits for it", found.partition("\n")[0], model)
        time.sleep(_POLL_SECONDS)


def _remove_stale(file: Path, content: str) -> None:
    """Remove the lock of a dead holder. Only one of several waiting processes succeeds in renaming it."""
    aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        file.rename(aside)
        if aside.read_text() == content:
            _log.warning("%s has not finished its download; this process goes on with it", content.partition("\n")[0])
            aside.unlink()
        else:  # another process has taken over in the meantime
            aside.rename(file)


def _keep_writing(file: Path, name: str, ended: threading.Event) -> None:
    beats = 0
    while not ended.wait(BEAT_SECONDS):
        beats += 1
        with contextlib.suppress(OSError), file.open("r+") as opened:
            opened.write(_content(name, beats))


def _content(name: str, beats: int) -> str:
    """What the file has in it. Its length does not change, so readers never find a part of it."""
    return f"{name}\n{beats:8d}\n"
