"""More ranks than cores, under load for a long time: no process may be taken for dead or stalled.

    python -m tests.faults.soak --seconds 600

The server has 8 ranks (TP 2, PP 2, DP 2) with the time limits that users get. All answers must be equal, and the log
must have no warning about a process.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time

import httpx

from tests.e2e.serving import Server, serve

REQUEST = {"model": "demo", "prompt": "The first thing that", "max_tokens": 60, "seed": 7, "ignore_eos": True}
_ALARM = re.compile(r"no sign of life|not answer|stalled|no progress|lost|killed|failed|has ended|starts again")


def run_clients(server: Server, seconds: float, num_clients: int) -> tuple[int, list[str]]:
    """The number of answers, and what was wrong with them."""
    expected = httpx.post(f"{server.url}/v1/completions", json=REQUEST, timeout=120.0).json()["choices"][0]["text"]
    deadline = time.monotonic() + seconds
    counts, wrong = [0] * num_clients, []

    def ask(index: int) -> None:
        while time.monotonic() < deadline and server.process.poll() is None:
            try:
                answer = httpx.post(f"{server.url}/v1/completions", json=REQUEST, timeout=120.0).json()
                if answer["choices"][0]["text"] != expected:
                    wrong.append(str(answer)[:200])
                counts[index] += 1
            except (httpx.HTTPError, KeyError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
            if time.monotonic() % 60 > 45:  # all clients pause, so that engines idle and probe their ranks
                time.sleep(10.0)

    clients = [threading.Thread(target=ask, args=(index,)) for index in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        while client.is_alive():
            client.join(30.0)
            left = max(0.0, deadline - time.monotonic())
            print(f"{sum(counts)} answers, {len(wrong)} wrong, {left:.0f} s left", file=sys.stderr, flush=True)
    return sum(counts), wrong


def main() -> int:
    """Serve for the given time, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=12)
    arguments = parser.parse_args()
    with serve("-tp", "2", "-pp", "2", "-dp", "2", "--kv-cache-memory", "32MiB", "--cpu-threads", "1") as server:
        count, wrong = run_clients(server, arguments.seconds, arguments.clients)
        alarms = [line for line in server.lines if _ALARM.search(line)]
    cores = len(os.sched_getaffinity(0))
    print(
        f"8 ranks on {cores} cores, {arguments.seconds:g} s: {count} answers, {len(wrong)} wrong, {len(alarms)} alarms"
    )
    print("\n".join([*wrong[:5], *alarms[:5]]))
    failed = bool(wrong or alarms or not count)
    print("FAILED" if failed else "PASSED")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
