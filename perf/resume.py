"""How long a stream pauses when its server is killed: `python perf/resume.py`.

Two demo servers stand behind a router. In each round a request streams from one of them, which is then killed
(SIGKILL), and goes on at the other. The pause is the longest time between two events after the kill. Of it is taken
what the other server needs anyway, measured just before on a request of as many tokens: the time to the first token of
prompt and answer so far. Aim: the rest is at most 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import httpx

_BEFORE_KILL = 40
"""Events of a stream that come before its server is killed."""
_TOKENS = 160


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Site:
    """Two servers and a router, each a process of its own."""

    def __init__(self) -> None:
        self.ports = [free_port(), free_port()]
        self.servers = [self.start_server(port) for port in self.ports]
        port = free_port()
        backends = [word for url in self.urls for word in ("--backend", url)]
        self.router = self._start("router", *backends, "--port", str(port))
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shardline", *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start_server(self, port: int) -> subprocess.Popen[bytes]:
        return self._start(
            "serve", "demo", "--port", str(port), "--seed", "7", "--cpu-threads", "1", "--no-enable-prefix-caching"
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 120.0
        while self._states() != ["ready"] * 2:
            if time.monotonic() > deadline:
                raise RuntimeError("the servers do not become ready")
            time.sleep(0.1)

    def _states(self) -> list[str]:
        """What the router says of the servers; nothing: one of them does not answer itself, or the router."""
        with contextlib.suppress(httpx.TransportError):
            if all(httpx.get(f"{url}/ready").status_code == 200 for url in self.urls):
                return [backend["state"] for backend in self.client.get("/router/status").json()["backends"]]
        return []

    def drain(self, index: int, drains: bool) -> None:
        action = "drain" if drains else "undrain"
        self.client.post(f"/router/{action}", json={"url": self.urls[index]}).raise_for_status()

    def close(self) -> None:
        self.client.close()
        for process in (*self.servers, self.router):
            process.kill()
            process.wait()


def event_times(client: httpx.Client, prompt: str, max_tokens: int, kill: Callable[[], None] | None) -> list[float]:
    """When the events of a stream came; `kill` is called after some of them, and times before it are left out."""
    fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, "stream": True}
    times, num_events, text = [time.perf_counter()], 0, b""
    with client.stream("POST", "/v1/completions", json=fields) as answer:
        answer.raise_for_status()
        for part in answer.iter_raw():
            times.append(time.perf_counter())
            text += part
            num_events += part.count(b"data: {")
            if kill is not None and num_events >= _BEFORE_KILL:
                kill()
                kill, times = None, [time.perf_counter()]
    if b'"error"' in text or not text.endswith(b"[DONE]\n\n"):
        raise RuntimeError(f"the stream ends with {text[-500:]!r}")
    return times


def rounds(site: Site, count: int, words: int) -> Iterator[tuple[float, float]]:
    """Seconds of the longest pause, and of the first token on the other server, of each round."""
    for number in range(count):
        victim = number % 2
        site.wait_ready()
        site.drain(1 - victim, True)
        prompt = f"{number}: " + "the old man and the sea " * words
        with httpx.Client(base_url=site.urls[1 - victim], timeout=60.0) as other:
            event_times(other, f"warm {prompt}", 2, None)
            first = event_times(other, f"again {prompt}" + "and the sea " * (_BEFORE_KILL // 6), 2, None)

        def kill(victim: int = victim) -> None:
            site.drain(1 - victim, False)
            site.servers[victim].kill()

        times = event_times(site.client, prompt, _TOKENS, kill)
        pause = max(after - before for before, after in itertools.pairwise(times))
        yield pause, first[1] - first[0]
        site.servers[victim].wait()
        site.servers[victim] = site.start_server(site.ports[victim])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--words", type=int, default=100, help="a prompt has six times as many")
    args = parser.parse_args()
    with contextlib.closing(Site()) as site:
        found = []
        for pause, prefill in rounds(site, args.rounds, args.words):
            found.append(1000 * (pause - prefill))
            print(f"pause {1000 * pause:6.1f} ms, first token elsewhere {1000 * prefill:6.1f} ms", flush=True)
    print(f"more than one prefill: {statistics.median(found):.1f} ms [{min(found):.1f}-{max(found):.1f}]")


if __name__ == "__main__":
    main()
