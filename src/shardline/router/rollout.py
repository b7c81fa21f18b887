"""Restarts the backends of a running router one after another, without an error for any client."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

_PAUSE_SECONDS = 0.2
_LOOKS = 2
"""The router looks so often at a backend before it counts as ready again: a look may have begun before the restart."""

Ask = Callable[[str, str | None], dict[str, Any]]
"""Has the router carry out an action on a backend; returns its status."""


class RolloutFailed(RuntimeError):
    """A backend could not be restarted; those after it are as they were. The message is for people."""


def roll_out(ask: Ask, command: str, timeout: float, tell: Callable[[str], None]) -> None:
    """Restart each backend by `command`, in which {host}, {port} and {url} are the backend's.

    A backend gets no new requests, finishes those that it has, is restarted, and gets requests again once it is ready,
    unless it was drained before. Each of these may take `timeout` seconds. `tell` gets a line about each step.

    Raises:
        RolloutFailed: at the first failure; its backend gets no requests until someone says so.
    """
    for backend in ask("status", None)["backends"]:
        _Restart(ask, backend["url"], timeout, tell).run(command)


class _Restart:
    """The restart of one backend."""

    def __init__(self, ask: Ask, url: str, timeout: float, tell: Callable[[str], None]) -> None:
        self._ask = ask
        self._url = url
        self._timeout = timeout
        self._tell = tell

    def run(self, command: str) -> None:
        """Drain, restart, and wait until it is ready."""
        self._await_others()
        was_draining = self._status()["draining"]
        self._ask("drain", self._url)
        self._tell(f"{self._url} gets no new requests")
        self._await(lambda backend: backend["requests"] == 0, "its requests have not ended")
        self._restart(command)
        looks = self._status()["looks"]
        self._await(
            lambda backend: backend["looks"] >= looks + _LOOKS and not backend["problem"], "it is not ready again"
        )
        if was_draining:
            self._tell(f"{self._url} is ready again, and stays drained as it was")
            return
        self._ask("undrain", self._url)
        self._tell(f"{self._url} is ready again")

    def _await_others(self) -> None:
        """Wait until another backend is ready, which the load of a restart may have kept from answering the router."""
        deadline, is_told = time.monotonic() + self._timeout, False
        while True:
            others = [one for one in self._ask("status", None)["backends"] if one["url"] != self._url]
            if any(one["state"] in ("ready", "busy") for one in others):
                return
            are = ", ".join(f"{one['url']} is {one['state']}" for one in others) or "there is none"
            if not others or time.monotonic() > deadline:
                raise RolloutFailed(f"{self._url} was not restarted: no other backend is ready ({are})")
            if not is_told:
                self._tell(f"{self._url} waits until another backend is ready ({are})")
            is_told = True
            time.sleep(_PAUSE_SECONDS)

    def _restart(self, command: str) -> None:
        parts = urlsplit(self._url)
        port = str(parts.port or {"http": 80, "https": 443}[parts.scheme])
        for name, value in (("{host}", parts.hostname or ""), ("{port}", port), ("{url}", self._url)):
            command = command.replace(name, shlex.quote(value))
        self._tell(f"{self._url}: {command}")
        try:
            code = subprocess.run(command, shell=True, timeout=self._timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            self._fail(f"the command took more than {self._timeout:g} s")
        if code != 0:
            self._fail(f"the command ended with exit code {code}")

    def _await(self, holds: Callable[[dict[str, Any]], bool], problem: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not holds(backend := self._status()):
            if time.monotonic() > deadline:
                why = f" ({backend['problem']})" if backend["problem"] else ""
                self._fail(f"{problem} after {self._timeout:g} s{why}")
            time.sleep(_PAUSE_SECONDS)

    def _status(self) -> dict[str, Any]:
        backends = self._ask("status", None)["backends"]
        found = next((backend for backend in backends if backend["url"] == self._url), None)
        if found is None:
            raise RolloutFailed(f"{self._url} is no backend of the router any more")
        return dict(found)

    def _fail(self, problem: str) -> NoReturn:
        raise RolloutFailed(
            f"{self._url}: {problem}. It gets no requests until `shardline router undrain {self._url}`; the backends "
            "after it were not restarted"
        )
