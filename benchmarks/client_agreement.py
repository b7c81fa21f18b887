"""Do `shardline bench serve` and `vllm bench serve` report the same? `python benchmarks/client_agreement.py`.

Both clients load one server in turns, with the same number of random prompts of the same lengths. `--vllm` is the
command that runs vLLM's client, for example "/opt/vllm/bin/vllm"; it needs an environment with vLLM 0.32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from shardline.models.hub import resolve_tokenizer

ROWS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "TTFT, mean (ms)",
    "median_ttft_ms": "TTFT, median (ms)",
    "mean_tpot_ms": "TPOT, mean (ms)",
    "median_tpot_ms": "TPOT, median (ms)",
    "mean_itl_ms": "ITL, mean (ms)",
}
AIM = 0.05
"""Largest difference of two medians, as a part of the smaller one."""


@contextlib.contextmanager
def serve(model: str) -> Iterator[str]:
    """The URL of a server."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "shardline", "serve", model, "--port", str(port), "--disable-access-log"]
    process = subprocess.Popen([*command, "--served-model-name", "served"], stderr=subprocess.DEVNULL)
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


def main() -> None:
    """Measure and print; the exit code is 1 if the medians differ by more than the aim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vllm", default="vllm", help="the command that runs vLLM (default: vllm)")
    parser.add_argument("--model", default="demo", help="the model to serve (default: demo)")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    clients = {"shardline": [sys.executable, "-m", "shardline"], "vllm": shlex.split(args.vllm)}
    folder = str(resolve_tokenizer(args.model))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
    with serve(args.model) as url:
        load(clients["shardline"], url, folder, 1000, args)  # the server's first steps
        for number in range(args.rounds):
            # The seeds differ, so that no run finds its prompts in the prefix cache.
            for index, (name, client) in enumerate(clients.items()):
                found[name].append(load(client, url, folder, 2 * number + index, args))
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
    if not agree:
        sys.exit(f"the clients differ by more than {AIM:.0%}")


if __name__ == "__main__":
    main()
