"""Servers whose ranks are on several hosts: one answer in every layout, and streams that outlive what is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from shardline import LLM, SamplingParams, lifeline
from tests.faults.hosts import TOKEN, Hosts, await_ready
from tests.faults.processes import command_line
from tests.faults.site import SMALL, Site, await_line, site
from tests.forks import ForkServer

PROMPT = "The first thing that"
STREAM = {"model": "demo", "prompt": PROMPT, "max_tokens": 400, "temperature": 0.8, "seed": 7, "ignore_eos": True}

FEW = 100
"""Tokens of an answer that nothing happens to."""
MANY = 1500
"""Tokens of an answer that takes long enough for something to happen."""


def _slack(seconds: float) -> float:
    """A promised time on a machine whose cores are all busy with other tests."""
    return 2 * seconds


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer) -> str:
    """What STREAM gives on one rank."""
    forked = patch.object(lifeline, "start_process", fork_server.start_process)
    with forked, contextlib.closing(LLM("demo", device="cpu")) as llm:
        params = SamplingParams(max_tokens=400, temperature=0.8, seed=7, ignore_eos=True)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


class Reader(threading.Thread):
    """Reads STREAM from a server, in a thread of its own."""

    def __init__(self, url: str, max_tokens: int = 400) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = STREAM | {"stream": True, "max_tokens": max_tokens}
        self.text = ""
        self.begun = threading.Event()
        self.error = ""
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=90.0) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                piece = json.loads(line.removeprefix("data: "))
                if "error" in piece:
                    self.error = str(piece)
                    return
                self.text += piece["choices"][0]["text"]
                if len(self.text) > 20:
                    self.begun.set()

    def finish(self, within: float) -> str:
        self.join(within)
        assert not self.is_alive(), "the stream hangs"
        assert not self.error
        return self.text


def assert_answers(url: str, undisturbed: str) -> None:
    """A server's answer has the text of one rank, as far as its fewer tokens go."""
    text = Reader(url, FEW).finish(60)
    assert len(text) > FEW
    assert undisturbed.startswith(text)


@pytest.mark.parametrize(("count", "flags", "forked"), [(2, ("-tp", "2"), False), (3, ("-pp", "3"), True)])
def test_one_answer_on_several_hosts(
    count: int, flags: tuple[str, ...], forked: bool, tmp_path: Path, undisturbed: str, fork_server: ForkServer
) -> None:
    """Two hosts start as users start them; a fork shows the environment of its server, in which there is no secret."""
    with site(tmp_path, count, *flags, forks=fork_server if forked else None) as server:
        assert_answers(server.url, undisturbed)
        # The table of ports in docs/operations.md: other ports are open only while groups form.
        assert [server.hosts.listeners(index) for index in range(count)] == [{8000, 29501}] + [set()] * (count - 1)
        assert_no_secrets(server, count)
        os.kill(server.head.pid, signal.SIGTERM)
        assert server.head.wait(15) == 0
        for node in server.nodes:
            assert node.wait(10) == 0
        assert [server.hosts.pids(index) for index in range(count)] == [[]] * count


def assert_no_secrets(server: Site, count: int) -> None:
    """The join token is in no log, on no command line, and not in the environment of ranks and engines."""
    for index in range(count):
        assert TOKEN not in server.log(index)
        for pid in server.hosts.pids(index):
            assert TOKEN not in command_line(pid)
            if re.search("shardline: (rank|engine)", command_line(pid)):
                assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_gloo_reaches_other_hosts(tmp_path: Path, undisturbed: str, fork_server: ForkServer) -> None:
    with site(tmp_path, 2, "-tp", "2", "--collectives", "gloo", forks=fork_server) as server:
        request = STREAM | {"max_tokens": 24}
        answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60.0).json()
        assert undisturbed.startswith(answer["choices"][0]["text"])
        assert len(answer["choices"][0]["text"]) > 24
        assert "tensor parallelism crosses nodes" in server.log()


def test_streams_outlive_lost_ranks_and_cut_hosts(tmp_path: Path, undisturbed: str, fork_server: ForkServer) -> None:
    with site(tmp_path, 2, "-dp", "2", forks=fork_server) as server:
        readers = [Reader(server.url) for _ in range(4)]
        for reader in readers:
            assert reader.begun.wait(20)
        server.hosts.cut(1)
        await_line(server, "has not been heard of for 4 s", _slack(6.0))
        assert [reader.finish(30) for reader in readers] == [undisturbed] * 4
        await_line(server, "waits for the next head", 8, index=1)
        server.hosts.heal(1)
        await_line(server, "replica 1 runs again", 40)
        # The engine of the head's host ends; all goes on at the node that has come back.
        readers = [Reader(server.url) for _ in range(2)]
        for reader in readers:
            assert reader.begun.wait(20)
        for pid in server.pids(r"rank 0: .*pid (\d+)"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert [reader.finish(30) for reader in readers] == [undisturbed] * 2
        await_line(server, "replica 0 runs again", 40)
        # A fast machine ends 400 tokens before the node has heard that it is to end.
        long = Reader(server.url, MANY).finish(30)
        assert long.startswith(undisturbed)
        readers = [Reader(server.url, MANY) for _ in range(4)]
        for reader in readers:
            assert reader.begun.wait(20)
        os.kill(server.nodes[0].pid, signal.SIGTERM)
        assert server.nodes[0].wait(10) == 0
        assert [reader.finish(30) for reader in readers] == [long] * 4
        *_, choices = re.findall(r"replica 1 is lost with (\d+) choices; .*leaves", server.log())
        assert int(choices) > 0, "streams ran on the node that ended"


@pytest.mark.parametrize("deaf", [0, 1])
def test_links_that_are_cut_in_one_direction_are_named_on_both_hosts(
    deaf: int, tmp_path: Path, undisturbed: str, fork_server: ForkServer
) -> None:
    with site(tmp_path, 2, "-dp", "2", forks=fork_server) as server:
        readers = [Reader(server.url) for _ in range(4)] if deaf else []
        for reader in readers:
            assert reader.begun.wait(20)
        server.hosts.deafen(deaf)
        began = time.monotonic()
        await_line(server, r"node 1 \(.*\) has not (been heard of for 4 s|answered for 5 s)", _slack(6.0))
        await_line(server, "the head has not been heard of for 4 s", began + _slack(6.0) - time.monotonic(), index=1)
        assert [reader.finish(30) for reader in readers] == [undisturbed] * len(readers)


SCRIPT = f"""
import sys
from pathlib import Path
from shardline import LLM, SamplingParams

rank, address, file = sys.argv[1:]
llm = LLM("demo", device="cpu", cpu_threads=1, pipeline_parallel_size=2, nnodes=2,
          node_rank=int(rank), master_addr=address, join_timeout=60)
params = SamplingParams(max_tokens={FEW}, temperature=0.8, seed=7, ignore_eos=True)
Path(file).write_text(llm.generate({PROMPT!r}, params, use_tqdm=False)[0].outputs[0].text)
llm.close()
"""


def test_one_script_on_two_hosts(tmp_path: Path, undisturbed: str) -> None:
    with contextlib.closing(Hosts(2)) as hosts:
        logs, files = ([tmp_path / f"{name}{rank}" for rank in range(2)] for name in ("log", "text"))
        scripts = [
            hosts.start_script(rank, SCRIPT, str(rank), hosts.address(0), str(files[rank]), log=logs[rank])
            for rank in range(2)
        ]
        for script, log in zip(scripts, logs, strict=True):
            assert script.wait(60) == 0, log.read_text()
        assert len(files[0].read_text()) > FEW
        assert undisturbed.startswith(files[0].read_text())
        assert not files[1].exists(), "above rank 0, LLM does not return"
        assert [hosts.pids(host) for host in range(2)] == [[], []]


def test_a_head_without_ranks_ends_all_at_the_first_failure(
    tmp_path: Path, undisturbed: str, fork_server: ForkServer
) -> None:
    with contextlib.closing(Hosts(2, forks=fork_server)) as hosts:
        logs = [tmp_path / f"host{index}.log" for index in range(2)]
        flags = ["serve", *SMALL, "-tp", "2", "--data-parallel-address", hosts.address(0), "--on-failure", "exit"]
        flags.append("--data-parallel-size-local")
        node = hosts.start(1, *flags, "1", "--headless", log=logs[1])
        head = hosts.start(0, *flags, "0", "--host", "0.0.0.0", log=logs[0])
        await_ready(hosts.address(0), 60.0, head, node)
        assert_answers(f"http://{hosts.address(0)}:8000", undisturbed)
        titles = [[command_line(pid) for pid in hosts.pids(host)] for host in range(2)]
        assert [sum("shardline: rank" in title for title in host) for host in titles] == [0, 2]
        os.kill(next(pid for pid in hosts.pids(1) if "shardline: rank" in command_line(pid)), signal.SIGKILL)
        assert (head.wait(10), node.wait(10)) == (1, 1), "\n".join(log.read_text() for log in logs)
        assert [hosts.pids(host) for host in range(2)] == [[], []]


def test_a_node_outlives_its_head(tmp_path: Path, undisturbed: str, fork_server: ForkServer) -> None:
    with site(tmp_path, 2, "-pp", "2", forks=fork_server) as server:
        assert server.pids(rf"rank 1: node 1 \(\S+, {re.escape(server.hosts.address(1))}\) .*pid (\d+)")
        assert re.search(r"link .*\(10\S+\) - .*: [\d,]+ µs a round trip, [\d.]+ Gb/s", server.log())
        os.killpg(server.head.pid, signal.SIGKILL)
        await_line(server, "waits for the next head", 8, index=1)
        server.head = server.start_node(0)
        server.await_ready()
        assert_answers(server.url, undisturbed)
        [worker] = [pid for pid in server.hosts.pids(1) if "shardline: rank" in command_line(pid)]
        os.kill(worker, signal.SIGSTOP)
        await_line(server, rf"pid {worker}, has given no sign of life for 4 s", _slack(5.0))
        server.await_ready()
        assert_answers(server.url, undisturbed)


def test_what_only_all_nodes_show_ends_each_with_the_reason(tmp_path: Path, fork_server: ForkServer) -> None:
    server = Site(tmp_path, 2, "-pp", "40", forks=fork_server)
    try:
        assert [process.wait(30) for process in (server.head, *server.nodes)] == [2, 2]
        assert "shardline: error: pipeline_parallel_size 40 needs at least as many layers" in server.log()
        assert "ERROR shardline.cluster.node: the head ends: pipeline_parallel_size 40 needs" in server.log(1)
    finally:
        server.hosts.close()


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (("--max-num-seqs", "7"), {}, "--max-num-seqs differs: the head has 128, .* 7"),
        ((), {"SHARDLINE_JOIN_TOKEN": "another-token-than-the-head"}, "the join tokens differ"),
        (
            ("--model", "no-such-folder/model"),
            {},
            "no-such-folder/model'?: there is no such folder, and the hub",
        ),
    ],
    ids=["flags", "token", "model"],
)
def test_a_node_that_does_not_fit_ends_with_one_line(
    flags: tuple[str, ...], environment: dict[str, str], message: str, waiting_head: Site
) -> None:
    log = waiting_head.logs[1]
    log.write_text("")
    node = waiting_head.start_node(1, *flags, **environment)
    assert node.wait(20) == 2
    assert re.search(message, log.read_text())
    assert sum("shardline: error:" in line for line in log.read_text().splitlines()) == 1
    assert waiting_head.head.poll() is None
    # Without the head's token, no message of the node reaches the head.
    on_head = "a node is refused: its join token" if message == "the join tokens differ" else message
    await_line(waiting_head, on_head, 1.0)


@pytest.fixture(scope="module")
def waiting_head(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Site]:
    """A head that waits for its node."""
    site = Site(tmp_path_factory.mktemp("site"), 2, started=1, forks=fork_server)
    try:
        await_line(site, "the head waits", 30)
        yield site
    finally:
        site.hosts.close()
