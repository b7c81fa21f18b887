"""An innocent client, in a process of its own: it reads one long stream after another, and notes when parts arrive.

    python -m tests.hostile.victim PORT

For each line on standard input it writes what has happened since the last one, as JSON. A plain socket disturbs the
times least.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

MAX_TOKENS = 1900
_BODY = {
    "prompt": "The first thing that",
    "max_tokens": MAX_TOKENS,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


class Victim:
    """Reads streams until it is told to end."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._gaps: list[float] = []
        self._waits: list[float] = []
        self._tokens: list[list[int]] = []
        self._errors: list[str] = []

    def take(self) -> dict[str, Any]:
        """What has happened: gaps between parts and waits for first parts in seconds, and the tokens of streams."""
        with self._lock:
            taken = {"gaps": self._gaps, "waits": self._waits, "tokens": self._tokens, "errors": self._errors}
            running = self._tokens[-1:]
            self._forget()
            self._tokens += [list(running[0])] if running else []  # the stream that runs goes on
        return taken

    def read_for_ever(self) -> None:
        """Read one stream after another."""
        while True:
            try:
                self._read_stream()
            except (OSError, ValueError, KeyError) as error:
                with self._lock:
                    self._errors.append(f"{type(error).__name__}: {error}"[:500])
                time.sleep(0.5)

    def _read_stream(self) -> None:
        body = json.dumps(_BODY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self._port), 60.0) as connection:
            began = last = time.perf_counter()
            connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            with self._lock:
                self._tokens.append([])
            buffer, first = b"", True
            while data := connection.recv(1 << 16):
                now = time.perf_counter()
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                tokens = [token for line in lines for token in _tokens_of(line)]
                if not tokens:
                    continue
                with self._lock:
                    (self._waits if first else self._gaps).append(now - (began if first else last))
                    self._tokens[-1] += tokens
                first, last = False, now
            if len(self._tokens[-1]) != MAX_TOKENS:
                raise ValueError(f"the stream ended after {len(self._tokens[-1])} tokens: {buffer[-300:]!r}")


def _tokens_of(line: bytes) -> list[int]:
    if not line.startswith(b"data: {"):
        return []
    event = json.loads(line[6:])
    if "error" in event:
        raise ValueError(line.decode())
    return [token for choice in event["choices"] for token in choice["token_ids"] or ()]


def main() -> None:
    """Read streams, and answer each line of standard input."""
    victim = Victim(int(sys.argv[1]))
    threading.Thread(target=victim.read_for_ever, daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps(victim.take()), flush=True)


if __name__ == "__main__":
    main()
