"""How long a body within the limits holds up other streams: `python perf/hostile_bodies.py`.

A server process streams the demo model's tokens to one client while another one sends hostile bodies. For each body the
table has the stream's longest gap, the answer's status, and how far the front's memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

AIM = 0.05
MEGABYTE = 1 << 20
MILLION = 990_000


def chat(**fields: Any) -> bytes:
    """A chat's body."""
    return json.dumps({"messages": user("Hi"), "max_tokens": 1, **fields}, separators=(",", ":")).encode()


def completion(**fields: Any) -> bytes:
    """A completion's body."""
    return json.dumps({"prompt": "Hi", "max_tokens": 1, **fields}, separators=(",", ":")).encode()


def user(content: Any) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def form(**fields: Any) -> bytes:
    """A chat whose answer has a form."""
    return chat(structured_outputs=fields)


def text(size: int) -> str:
    """A text of this many characters."""
    return ("A stream must not wait for this. " * (size // 33 + 1))[:size]


def tool(parameters: dict[str, Any], number: int = 0) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


PROPERTIES = {f"p{index}": {"type": "string"} for index in range(2000)}
PARTS = [{"type": "text", "text": "a"}] * 4
TOOL = {"type": "function", "function": {"name": "f", "description": text(14_000), "parameters": {"type": "object"}}}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [7] * MILLION}}}]}
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "messages: numbers": (CHAT, lambda: chat(messages=[1] * MILLION)),
    "messages: long numbers": (CHAT, lambda: chat(messages=[1234567890123] * MILLION)),
    "messages: fractions": (CHAT, lambda: chat(messages=[1.234567890123e-7] * 800_000)),
    "messages: strings": (CHAT, lambda: chat(messages=["abcdefgh"] * MILLION)),
    "messages: 3,000 valid, 4 parts each": (CHAT, lambda: chat(messages=[{"role": "user", "content": PARTS}] * 3000)),
    "messages: 15 MB of text": (CHAT, lambda: chat(messages=user(text(15 * MEGABYTE)))),
    "messages: 15 MB of escapes": (CHAT, lambda: chat(messages=user("é" * (5 * MEGABYTE // 2)))),
    "messages: 15 MB of quotes": (CHAT, lambda: chat(messages=user('"' * (7 * MEGABYTE)))),
    "messages: 15 MB in 4,000": (CHAT, lambda: chat(messages=[{"role": "user", "content": text(3800)}] * 4000)),
    "stop: numbers": (CHAT, lambda: chat(stop=[1] * MILLION)),
    "stop: strings": (CHAT, lambda: chat(stop=["ab"] * MILLION)),
    "stop: one of 15 MB": (CHAT, lambda: chat(stop=text(15 * MEGABYTE))),
    "stop_token_ids": (CHAT, lambda: chat(stop_token_ids=[7] * MILLION)),
    "allowed_token_ids": (CHAT, lambda: chat(allowed_token_ids=[7] * MILLION)),
    "bad_words": (CHAT, lambda: chat(bad_words=["ab"] * MILLION)),
    "bad_words: one of 15 MB": (CHAT, lambda: chat(bad_words=[text(15 * MEGABYTE)])),
    "logit_bias": (CHAT, lambda: chat(logit_bias={str(index): 1 for index in range(49_000)})),
    "unknown fields": (CHAT, lambda: chat(**{f"field{index}": 1 for index in range(49_000)})),
    "metadata: one string of 15 MB": (CHAT, lambda: chat(metadata={"a": text(15 * MEGABYTE)})),
    "kwargs: numbers": (CHAT, lambda: chat(chat_template_kwargs={"a": [1] * MILLION})),
    "kwargs: objects": (CHAT, lambda: chat(chat_template_kwargs={"a": [{"b": 1}] * 16_000})),
    "documents": (CHAT, lambda: chat(documents=[{"text": "a", "title": "b"}] * 16_000)),
    "nesting": (CHAT, lambda: b'{"messages":' + b"[" * 16_000 + b"]" * 16_000 + b"}"),
    "nesting within a string": (CHAT, lambda: chat(messages=user("[{,:" * (4 * MEGABYTE - 9999)))),
    "tools": (CHAT, lambda: chat(tools=[TOOL] * 1000)),
    "tools: a large schema": (CHAT, lambda: chat(tools=[tool({"enum": [7] * MILLION})])),
    "tools: 90 schemas": (CHAT, lambda: chat(tools=[tool({"enum": list(range(10_000))}, n) for n in range(90)])),
    "tools: properties": (CHAT, lambda: chat(tools=[tool({"properties": PROPERTIES}, n) for n in range(8)])),
    "tool_calls: numbers": (CHAT, lambda: chat(messages=[CALLING, *user("Hi")])),
    "tools: numbers": (CHAT, lambda: chat(tools=[1] * MILLION)),
    "schema: a large enum": (CHAT, lambda: form(json={"enum": list(range(MILLION))})),
    "schema: properties": (CHAT, lambda: form(json={"type": "object", "properties": PROPERTIES})),
    "schema: 9,000 choices": (CHAT, lambda: form(choice=[f"w{n}" for n in range(9_000)])),
    "schema: 128 Ki of choices": (CHAT, lambda: form(choice=[f"w{n}" for n in range(14_000)])),
    "choices": (CHAT, lambda: form(choice=["ab"] * MILLION)),
    "regex: nested counts": (CHAT, lambda: form(regex="(a{1,1000}){1,1000}")),
    "regex: 15 MB": (CHAT, lambda: form(regex="a" * (15 * MEGABYTE))),
    "grammar: 15 MB": (CHAT, lambda: form(grammar='start: "a"\n' * MEGABYTE)),
    "json: 15 MB as a text": (CHAT, lambda: form(json="[" + "1," * (7 * MEGABYTE) + "1]")),
    "response_format": (CHAT, lambda: chat(response_format={"type": "json_schema", "json_schema": [1] * MILLION})),
    "prompt: ids": (COMPLETION, lambda: completion(prompt=[7] * MILLION)),
    "prompt: texts": (COMPLETION, lambda: completion(prompt=["a"] * MILLION)),
    "prompt: lists of ids": (COMPLETION, lambda: completion(prompt=[[7]] * 16_000)),
    "prompt: 15 MB": (COMPLETION, lambda: completion(prompt=text(15 * MEGABYTE))),
    "prompt: one word of 15 MB": (COMPLETION, lambda: completion(prompt="a" * (15 * MEGABYTE))),
    "suffix: 15 MB": (COMPLETION, lambda: completion(suffix=text(15 * MEGABYTE))),
    "tokenize: 15 MB": ("/tokenize", lambda: json.dumps({"prompt": text(15 * MEGABYTE)}).encode()),
    "tokenize: the longest": ("/tokenize", lambda: json.dumps({"prompt": text(60_000)}).encode()),
    "detokenize": ("/detokenize", lambda: json.dumps({"tokens": [7] * MILLION}).encode()),
    "input: numbers": (RESPONSE, lambda: json.dumps({"input": [1] * MILLION}).encode()),
    "input: 4,000 messages": (
        RESPONSE,
        lambda: json.dumps({"input": user([{"type": "input_text", "text": "a"}]) * 4000}).encode(),
    ),
    "not JSON: 15 MB of spaces": (CHAT, lambda: b" " * (15 * MEGABYTE)),
    "not JSON: an open string": (CHAT, lambda: b'{"messages":"' + b"\\\\" * (7 * MEGABYTE)),
}  # fmt: skip


@contextlib.contextmanager
def serve() -> Iterator[tuple[int, int]]:
    """The port and the process id of a server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "shardline", "serve", "demo", "--port", str(port), "--disable-access-log"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while status_of(port, b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") != 200:
            assert time.monotonic() < deadline, "the server did not start"
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(30)


def status_of(port: int, request: bytes) -> int:
    """The status of the answer to a request; 0: there was none."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall(request)
        head = connection.recv(65536)
        return int(head.split()[1]) if head else 0
    return 0


def request_of(path: str, body: bytes) -> bytes:
    """A whole request."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def resident_megabytes(pid: int) -> float:
    """Memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / MEGABYTE


class Stream:
    """A client that reads one stream after another, and notes the longest gap between two pieces."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._longest = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def take_longest(self) -> float:
        """The longest gap since the last call, in seconds."""
        longest, self._longest = self._longest, 0.0
        return longest

    def end(self) -> None:
        """Stop reading."""
        self._ended = True
        self._thread.join()

    def _read(self) -> None:
        body = completion(stream=True, max_tokens=1900, ignore_eos=True)
        while not self._ended:
            with socket.create_connection(("127.0.0.1", self._port), 60) as connection:
                connection.sendall(request_of(COMPLETION, body))
                connection.recv(65536)
                last = time.perf_counter()
                while (data := connection.recv(65536)) and not self._ended:
                    now = time.perf_counter()
                    self._longest = max(self._longest, now - last)
                    last = now
                    if b"data: [DONE]" in data:
                        break


def main() -> None:
    """Measure and print; the exit code is 1 if a body holds the stream up for longer than the aim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="only bodies whose names contain one of these, separated by commas")
    parser.add_argument("--times", type=int, default=2, help="how often each body is sent (default: 2)")
    args = parser.parse_args()
    slow = []
    with serve() as (port, pid):
        stream = Stream(port)
        try:
            time.sleep(2)
            stream.take_longest()
            time.sleep(2)
            print(f"{'nothing':<38} {1e3 * stream.take_longest():7.1f} ms", flush=True)
            for name, (path, make) in BODIES.items():
                if not any(word in name for word in args.only.split(",")):
                    continue
                request = request_of(path, make())
                time.sleep(0.3)
                before = resident_megabytes(pid)
                gaps = []
                for _ in range(args.times):
                    stream.take_longest()
                    started = time.perf_counter()
                    status = status_of(port, request)
                    seconds = time.perf_counter() - started
                    time.sleep(0.1)
                    gaps.append(stream.take_longest())
                mark = "SLOW" if min(gaps) > AIM else ""
                grown = resident_megabytes(pid) - before
                times = f"{1e3 * min(gaps):7.1f} ms [-{1e3 * max(gaps):.1f}]"
                print(f"{name:<38} {times:<22} {status} after {seconds:6.2f} s {grown:+7.1f} MB {mark}", flush=True)
                slow += [name] if mark else []
        finally:
            stream.end()
    if slow:
        sys.exit(f"longer than {1e3 * AIM:.0f} ms: {', '.join(slow)}")


if __name__ == "__main__":
    main()
