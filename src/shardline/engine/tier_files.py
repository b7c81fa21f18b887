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
    """The keys of the files of one rank. Every rank has files for the same keys, unless some were removed.

    A thread lists the folder, so that no step waits for a slow one. It lists only subfolders that have changed.
    """

    def __init__(self, folder: Path) -> None:
        """Returns once the folder has been listed, or cannot be."""
        self._folder = folder
        self._keys: dict[str, set[bytes]] = {}
        """By subfolder."""
        self._seen: dict[str, int] = {}
        """When each subfolder had changed, in nanoseconds."""
        self._closed = threading.Event()
        self.update()
        threading.Thread(target=_keep_updated, args=(ref(self), self._closed), name="tier files", daemon=True).start()

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys.get(key[:1].hex(), ())

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, key: bytes) -> None:
        """Ranks write it."""
        self._keys.setdefault(key[:1].hex(), set()).add(key)

    def discard(self, key: bytes) -> None:
        """A rank has not found it."""
        self._keys.get(key[:1].hex(), set()).discard(key)

    def close(self) -> None:
        """Look at the folder no more."""
        self._closed.set()

    def update(self) -> None:
        """List what has changed. A folder that cannot be listed has nothing."""
        try:
            with os.scandir(self._folder) as entries:
                subfolders = [entry.name for entry in entries if len(entry.name) == 2]
        except OSError:
            return
        for name in subfolders:
            path = self._folder / name
            try:
                changed = path.stat().st_mtime_ns
                # Files that come within a tick of the clock after the listing do not change the time.
                if changed == self._seen.get(name):
                    continue
                is_settled = time.time_ns() - changed > 1_000_000_000
                keys = {key for file in os.listdir(path) if (key := key_of(name, file)) is not None}
            except OSError:
                continue
            self._keys[name] = keys
            if is_settled:
                self._seen[name] = changed


def _keep_updated(index: ref[FileIndex], closed: threading.Event) -> None:
    while not closed.wait(_LOOK_SECONDS):
        alive = index()
        if alive is None:
            return
        alive.update()
        del alive
