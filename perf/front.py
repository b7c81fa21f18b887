"""Processor time of the front for each streamed chat token: `python perf/front.py`.

The front is a whole server process. Its engine is a stub in a process of its own that sends one token to every stream
in each tick; this process is the client. So every token is one event, and only the front's time is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from shardline.channel import Channel, encode_message
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.engine import (
    AbortRequests,
    AddRequests,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    FrontMessage,
    StopEngine,
)
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats

MAX_MODEL_LEN = 4096
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
TEXT = (
    "The scheduler fills one token budget with decodes first, then with chunks of prompts. A block returns to the pool "
    "when no plan in flight reads it, and a stream that is slow does not hold others back. "
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


class StubClient:
    """What the front sees of the stub engine: a channel and a reader thread, as of the real one."""

    def __init__(self, on_message: Callable[[EngineOutputs], None], seconds_per_token: float, num_streams: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [str(theirs.fileno()), str(seconds_per_token), str(num_streams)]
            command = [sys.executable, __file__, "--engine", *words]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._channel: Channel[EngineMessage] = Channel(ours, EngineMessage)  # type: ignore[arg-type]
        self._on_message = on_message
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """The stub is ready at once."""
        return EngineReady(MAX_MODEL_LEN, 16, NumericContract("stub"), 25.0, [])

    def add(self, requests: Sequence[Request]) -> None:
        """Hand over requests."""
        for request in requests:
            self._channel.send_encoded(encode_message(AddRequests([request])))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Hand over aborts."""
        self._channel.send(AbortRequests(list(request_ids)))

    def reset_prefix_cache(self) -> None:
        """It has none."""

    def close(self, timeout: float = 10.0) -> None:
        """End the stub."""
        with contextlib.suppress(OSError):
            self._channel.send(StopEngine())
        self._process.wait(timeout)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._channel.receive()
                assert isinstance(message, EngineOutputs)
                self._on_message(message)


def run_engine(descriptor: int, seconds_per_token: float, num_streams: int) -> None:
    """Wait for all streams, then send a token to each in every tick; the whole ticks take `seconds_per_token` each."""
    from shardline.checkpoints.hub import resolve_tokenizer
    from shardline.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_tokenizer("demo"))
    assert tokenizer is not None
    tokens = tokenizer.encode_text(TEXT, add_special_tokens=False)
    channel: Channel[FrontMessage] = Channel(socket.socket(fileno=descriptor), FrontMessage)  # type: ignore[arg-type]
    running: dict[str, Request] = {}
    while len(running) < num_streams:
        message = channel.receive()
        if isinstance(message, AddRequests):
            running.update((request.request_id, request) for request in message.requests)
        else:
            return
    most = next(iter(running.values())).sampling.max_tokens
    assert most is not None
    tick = time.perf_counter()
    for number in range(1, most + 1):
        token = tokens[number % len(tokens)]
        reason = "length" if number == most else None
        outputs = [SequenceOutput(one.request_id, [token], finish_reason=reason) for one in running.values()]
        channel.send(EngineOutputs(outputs, EngineStats(num_running=len(running))))
        tick += seconds_per_token
        time.sleep(max(0.0, tick - time.perf_counter()))
    with contextlib.suppress(EOFError):
        while not isinstance(channel.receive(), StopEngine):
            pass


def run_front(port: int, seconds_per_token: float, num_streams: int, parsers: bool) -> int:
    """Serve with the stub engine."""
    from shardline.api.async_llm import AsyncLLM
    from shardline.server.launch import run_server

    def start(config: EngineConfig) -> AsyncLLM:
        return AsyncLLM(
            config, connect=lambda config, replica, on_message: StubClient(on_message, seconds_per_token, num_streams)
        )

    options = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"} if parsers else {}
    config = EngineConfig.from_options(max_num_seqs=num_streams, max_num_waiting=num_streams, on_failure="exit")
    return run_server(config, ServerConfig(port=port, disable_access_log=True, **options), start_llm=start)


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


async def read_streams(pid: int, port: int, num_streams: int, num_tokens: int, parsers: bool) -> tuple[float, float]:
    """Processor seconds and tokens of the middle of all streams."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": num_tokens}
    if parsers:
        body["tools"] = [TOOL]
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data
    events = ended = 0

    class Reader(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(request)

        def data_received(self, data: bytes) -> None:
            nonlocal events, ended
            events += data.count(b"data: {")
            ended += data.count(b"data: [DONE]")

    loop = asyncio.get_running_loop()
    for _ in range(num_streams):
        await loop.create_connection(Reader, "127.0.0.1", port)

    samples = []
    while ended < num_streams:
        samples.append((cpu_seconds(pid), events))
        await asyncio.sleep(0.01)
    # Each stream also has events with its role and its finish reason. Parsers hold tokens back, which share events.
    # While streams begin, the front may be behind.
    assert parsers or events >= 0.97 * num_streams * num_tokens, "tokens shared events: raise --pace"
    middle = [sample for sample in samples if 0.1 * events <= sample[1] <= 0.9 * events]
    (first_cpu, first), (last_cpu, last) = middle[0], middle[-1]
    return last_cpu - first_cpu, num_streams * num_tokens * (last - first) / events


def measure(num_streams: int, num_tokens: int, microseconds: float, parsers: bool) -> float:
    """Microseconds of the front for each token; the engine sends a token every `microseconds`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    tick = num_streams * microseconds / 1e6
    words = ["--front", str(port), str(tick), str(num_streams), str(int(parsers))]
    process = subprocess.Popen([sys.executable, __file__, *words], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as probe:
                probe.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
                if b"200 OK" in probe.recv(4096):
                    break
            assert time.monotonic() < deadline, "the front did not start"
            assert process.poll() is None, "the front has ended"
            time.sleep(0.1)
        seconds, tokens = asyncio.run(read_streams(process.pid, port, num_streams, num_tokens, parsers))
        return 1e6 * seconds / tokens
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="256,1000", help="numbers of streams (default: 256,1000)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream (default: 100)")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs, of which the median counts (default: 3)")
    parser.add_argument("--pace", type=float, default=100, help="microseconds per token of the engine (default: 100)")
    parser.add_argument("--no-parsers", action="store_true", help="only answers that are not parsed")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--front", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        run_engine(int(args.engine[0]), float(args.engine[1]), int(args.engine[2]))
        return
    if args.front:
        port, tick, streams, parsers = args.front
        sys.exit(run_front(int(port), float(tick), int(streams), bool(int(parsers))))
    shapes = [(int(word), parsers) for word in args.streams.split(",") for parsers in (False, True)]
    shapes = [shape for shape in shapes if not (shape[1] and args.no_parsers)]
    found: dict[tuple[int, bool], list[float]] = {shape: [] for shape in shapes}
    for _ in range(args.runs):
        for shape in shapes:
            found[shape].append(measure(shape[0], args.tokens, args.pace, shape[1]))
    print(f"{'streams':>8} {'parsers':>8} {'µs/token':>9} {'least':>7} {'most':>7} {'tokens/s of a core':>19}")
    for (streams, parsers), values in found.items():
        median = statistics.median(values)
        mark = "both" if parsers else "none"
        print(f"{streams:>8} {mark:>8} {median:9.1f} {min(values):7.1f} {max(values):7.1f} {1e6 / median:19,.0f}")


if __name__ == "__main__":
    main()
