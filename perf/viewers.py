"""What viewers of /cluster cost a server's front: `python perf/viewers.py`.

A server with two replicas is idle, and then has viewers, in turns. The processor time of its front in each, as a share
of one core; medians and spread of the rounds. Aim: five viewers cost at most 1%.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path

import httpx

_TICKS = os.sysconf("SC_CLK_TCK")


def own_seconds(pid: int) -> float:
    """Processor time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def watch(url: str, seen: list[int]) -> None:
    """Follow /cluster until cancelled, and count the events."""
    headers = {"accept": "text/event-stream"}
    async with httpx.AsyncClient(timeout=None) as http, http.stream("GET", f"{url}/cluster", headers=headers) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            seen[0] += part.count(b"\n\n")


async def share_of_core(pid: int, url: str, viewers: int, seconds: float) -> float:
    """What the front uses while so many viewers watch."""
    seen = [0]
    tasks = [asyncio.create_task(watch(url, seen)) for _ in range(viewers)]
    await asyncio.sleep(2.0)
    seen[0], before = 0, own_seconds(pid)
    await asyncio.sleep(seconds)
    used = own_seconds(pid) - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert seen[0] >= viewers * (seconds - 2.0), f"{viewers} viewers have seen {seen[0]} events"
    return used / seconds


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each look")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    words = ["serve", "demo", "-dp", "2", "--cpu-threads", "1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "shardline", *words], stderr=subprocess.DEVNULL)
    try:
        async with httpx.AsyncClient() as http, asyncio.timeout(120.0):
            ready = False
            while not ready:
                await asyncio.sleep(0.5)
                with contextlib.suppress(httpx.TransportError):
                    ready = (await http.get(f"{url}/ready")).status_code == 200
        found: list[float] = []
        for _ in range(args.rounds):
            idle = await share_of_core(server.pid, url, 0, args.seconds)
            found.append(100 * (await share_of_core(server.pid, url, args.viewers, args.seconds) - idle))
            print(f"idle {100 * idle:.2f}% of a core, {args.viewers} viewers add {found[-1]:.2f}%", flush=True)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    print(f"{args.viewers} viewers: {statistics.median(found):.2f}% of a core ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    asyncio.run(main())
