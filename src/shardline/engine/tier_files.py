"""What is in the files behind a tier, as an engine knows it: a guess, which ranks correct when they read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from weakref import ref

from shardline.deployment.block_folder import key_of

_LOOK_SECONDS = 10.0
"""How often the folder is looked at, for what others have written and removed."""


class FileIndex:
    """The keys of the files of one rank. Every rank has files for the same keys, unless some were removed. Ranks that
    share the keys of a request have a folder each, in their order.

    A thread lists the folders, so that no step waits for a slow one. It lists only subfolders that have changed.
    """

    def __init__(self, *folders: Path) -> None:
        """Returns once the folders have been listed, or cannot be."""
        self._keys: dict[Path, dict[str, set[bytes]]] = {folder: {} for folder in folders}
        """By folder and subfolder."""
        self._seen: dict[Path, int] = {}
        """When each subfolder had changed, in nanoseconds."""
        self._closed = threading.Event()
        self.update()
        threading.Thread(target=_keep_updated, args=(ref(self), self._closed), name="tier files", daemon=True).start()

    def __contains__(self, key: bytes) -> bool:
        name = key[:1].hex()
        return any(key in keys.get(name, ()) for keys in self._keys.values())

    def __len__(self) -> int:
        return sum(len(some) for keys in self._keys.values() for some in keys.values())

    def add(self, key: bytes) -> None:
        """Ranks write it. Which of the folders has it is known once they are listed."""
        next(iter(self._keys.values())).setdefault(key[:1].hex(), set()).add(key)

    def discard(self, key: bytes) -> None:
        """A rank has not found it."""
        for keys in self._keys.values():
            keys.get(key[:1].hex(), set()).discard(key)

    def close(self) -> None:
        """Look at the folder no more."""
        self._closed.set()

    def update(self) -> None:
        """List what has changed. A folder that cannot be listed has nothing."""
        for folder, known in self._keys.items():
            self._update(folder, known)

    def _update(self, folder: Path, known: dict[str, set[bytes]]) -> None:
        try:
            with os.scandir(folder) as entries:
                subfolders = [entry.name for entry in entries if len(entry.name) == 2]
        except OSError:
            return
        for name in subfolders:
            path = folder / name
            try:
                changed = path.stat().st_mtime_ns
                # Files that come within a tick of the clock after the listing do not change the time.
                if changed == self._seen.get(path):
                    continue
                is_settled = time.time_ns() - changed > 1_000_000_000
                keys = {key for file in os.listdir(path) if (key := key_of(name, file)) is not None}
            except OSError:
                continue
            known[name] = keys
            if is_settled:
                self._seen[path] = changed


def _keep_updated(index: ref[FileIndex], closed: threading.Event) -> None:
    while not closed.wait(_LOOK_SECONDS):
        alive = index()
        if alive is None:
            return
        alive.update()
        del alive
