"""Does `shardline bench serve` measure the server, and not itself? `python perf/client_agreement.py [CASE ...]`.

agree   It and `vllm bench serve` load one server in turns, with the same number of random prompts of the same lengths.
        Their figures are compared. `--vllm` is the command that runs vLLM's client, for example "/opt/vllm/bin/vllm";
        it needs an environment with vLLM 0.32. The server only keeps time: a first token after 100 ms, then one every
        5 ms. With `--engine` it is a real one, whose speed varies between the turns as the machine's does.
rate    It sends requests for one token to a server that answers at once, in a process of its own. The rate is that of
        the client, which has one thread. Aim: 3,000 requests a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardline.checkpoints.hub import resolve_tokenizer

ROWS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "TTFT, mean (ms)",
    "median_ttft_ms": "TTFT, median (ms)",
    "mean_tpot_ms": "TPOT, mean (ms)",
    "median_tpot_ms": "TPOT, median (ms)",
    "mean_itl_ms": "ITL, mean (ms)",
}
RATE_AIM = 3000
"""Requests per second."""
AIM = 0.05
"""Largest difference of two medians, as a part of the smaller one."""


@contextlib.contextmanager
def serve(model: str) -> Iterator[str]:
    """The URL of a server. Its engine has one thread, so that a client does not slow it down on two cores."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "shardline", "serve", model, "--port", str(port), "--disable-access-log"]
    command += ["--served-model-name", "served", "--cpu-threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5):
                break
            assert time.monotonic() < deadline, "the server did not start"
            assert process.poll() is None, "the server has ended"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


class Stub(asyncio.Protocol):
    """A server that only keeps time. It answers with the model's name, or with a stream of `max_tokens` tokens."""

    _TOKEN = b'{"choices":[{"index":0,"text":"a","finish_reason":null}]}'
    _USAGE = b'{"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d}}'
    _HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    _MODELS = b'{"object":"list","data":[{"id":"served","object":"model"}]}'

    def __init__(self, ttft: float, tpot: float) -> None:
        """Seconds until the first token, and between tokens."""
        self._ttft, self._tpot = ttft, tpot
        self._loop = asyncio.get_running_loop()
        self._waiting = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        while (end := self._waiting.find(b"\r\n\r\n")) >= 0:
            length = re.search(rb"(?i)content-length: *(\d+)", self._waiting[:end])
            size = end + 4 + (int(length.group(1)) if length else 0)
            if len(self._waiting) < size:
                return
            request, self._waiting = self._waiting[:size], self._waiting[size:]
            most = re.search(rb'"max_tokens": *(\d+)', request)
            if most is None:
                body = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(self._MODELS), self._MODELS)
                self._transport.write(body)
            elif self._ttft:
                self._loop.call_later(self._ttft, self._send, self._loop.time() + self._ttft, 0, int(most.group(1)))
            else:
                self._send(0.0, 0, int(most.group(1)))

    def _send(self, first: float, number: int, count: int) -> None:
        """Send a token, and then the next one at its time after the `first` one."""
        pieces = self._HEAD if number == 0 else b""
        pieces += self._event(self._TOKEN)
        if number + 1 == count:
            pieces += self._event(self._USAGE % count) + self._event(b"[DONE]") + b"0\r\n\r\n"
        self._transport.write(pieces)
        if number + 1 < count:
            self._loop.call_at(first + (number + 1) * self._tpot, self._send, first, number + 1, count)

    @staticmethod
    def _event(data: bytes) -> bytes:
        """A chunk with one event."""
        return b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)


def run_stub(listener: socket.socket, ttft: float, tpot: float) -> None:
    """Serve until the process is ended."""

    async def serve_forever() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Stub(ttft, tpot), sock=listener)
        await server.serve_forever()

    asyncio.run(serve_forever())


@contextlib.contextmanager
def stub(ttft: float, tpot: float) -> Iterator[str]:
    """The URL of a `Stub` in a process of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        process = multiprocessing.get_context("fork").Process(target=run_stub, args=(listener, ttft, tpot), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.join()


def load(client: list[str], url: str, folder: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The result of one run of a client."""
    with tempfile.TemporaryDirectory() as results:
        options = {
            "--backend": "openai",
            "--base-url": url,
            "--model": "served",
            "--tokenizer": folder,
            "--dataset-name": "random",
            "--random-input-len": args.input_len,
            "--random-output-len": args.output_len,
            "--num-prompts": args.num_prompts,
            "--max-concurrency": args.max_concurrency,
            "--seed": seed,
            "--result-dir": results,
            "--result-filename": "result.json",
        }
        words = [str(word) for option in options.items() for word in option]
        done = subprocess.run([*client, "bench", "serve", *words, "--save-result"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads((Path(results) / "result.json").read_text())
    assert found["completed"] == args.num_prompts, f"{found['completed']} requests succeeded"
    return found


def compare_clients(args: argparse.Namespace, folder: str) -> bool:
    """Print the figures of both clients, and return whether they agree."""
    clients = {"shardline": [sys.executable, "-m", "shardline"], "vllm": shlex.split(args.vllm)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    with serve(args.model) if args.engine else stub(0.1, 0.005) as url:
        load(clients["shardline"], url, folder, 1000, args)  # the server's first steps
        for number in range(args.rounds):
            # The seeds differ, so that no run finds its prompts in the prefix cache.
            for index, (name, client) in enumerate(clients.items()):
                found[name].append(load(client, url, folder, args.seed + 2 * number + index, args))
    agree = True
    print(f"{'':<20} {'shardline':>26} {'vllm':>26} {'ratio':>7}")
    for row, title in ROWS.items():
        medians, cells = [], []
        for results in found.values():
            values = [result[row] for result in results]
            medians.append(statistics.median(values))
            cells.append(f"{medians[-1]:10.2f} [{min(values):.2f}-{max(values):.2f}]")
        ratio = medians[0] / medians[1]
        agree = agree and max(ratio, 1 / ratio) <= 1 + AIM
        print(f"{title:<20} {cells[0]:>26} {cells[1]:>26} {ratio:7.3f}")
    return agree


def measure_rate(args: argparse.Namespace, folder: str) -> bool:
    """Print the client's own rate, and return whether it reaches the aim."""
    one_token = argparse.Namespace(input_len=16, output_len=1, num_prompts=args.num_stubbed, max_concurrency=64)
    with stub(0.0, 0.0) as url:
        command = [sys.executable, "-m", "shardline"]
        results = [load(command, url, folder, number, one_token) for number in range(args.rounds)]
    rates = [result["request_throughput"] for result in results]
    rate = statistics.median(rates)
    print(f"requests for one token: {rate:,.0f} a second [{min(rates):,.0f}-{max(rates):,.0f}] (aim {RATE_AIM:,})")
    return rate >= RATE_AIM


def main() -> None:
    """Measure and print; the exit code is 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = {"agree": compare_clients, "rate": measure_rate}
    parser.add_argument("case", nargs="*", choices=[*cases, []], help="default: both")
    parser.add_argument("--vllm", default="vllm", help="the command that runs vLLM (default: vllm)")
    parser.add_argument("--engine", action="store_true", help="compare on an engine")
    parser.add_argument("--model", default="demo", help="the model to serve (default: demo)")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--num-stubbed", type=int, default=20_000, help="requests for one token (default: 20000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompts")
    args = parser.parse_args()
    folder = str(resolve_tokenizer(args.model))
    met = [cases[name](args, folder) for name in args.case or cases]
    if not all(met):
        sys.exit("an aim is missed")


if __name__ == "__main__":
    main()
