"""The doctor on the head and on a node, over the loopback interface."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from shardline.checkpoints.hub import find_local_model
from shardline.cli.main import main
from shardline.cluster.wire import NodeSocket
from shardline.config.engine import EngineConfig
from shardline.config.parallel import ParallelConfig
from shardline.doctor import examine, gather
from shardline.doctor.facts import Finding, ModelFacts, NodeFacts, Report
from shardline.messages.node import Measured
from tests.doctor.test_checks import facts, host

TOKEN = "the-token-of-this-test-2"


@pytest.fixture
def config() -> EngineConfig:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return EngineConfig.from_options(pipeline_parallel_size=2, nnodes=2, master_addr="127.0.0.1", master_port=port)


def local(node: int) -> NodeFacts:
    demo = ModelFacts("demo", str(find_local_model("demo", None)), "d1")
    return facts(node, host=host(name="ab"[node], address="127.0.0.1"), model=demo)


def visit(config: EngineConfig, node: NodeFacts, wait: float = 5.0, token: str = TOKEN) -> Report:
    return examine._visit_head(token, config, node, Report((), (node,)), wait)


def run_both(first: Callable[[], Report], second: Callable[[], Report]) -> tuple[Report, Report]:
    """The results of two functions that run at the same time."""
    reports: list[Report] = []
    thread = threading.Thread(target=lambda: reports.append(second()))
    thread.start()
    result = first()
    thread.join()
    return result, reports[0]


def finding(report: Report, item: str) -> Finding:
    (found,) = [finding for finding in report.findings if finding.item == item]
    return found


def test_both_nodes_get_the_same_report_within_seconds(config: EngineConfig) -> None:
    began = time.monotonic()
    reception = examine.Reception(TOKEN, config, local(0))
    ours, theirs = run_both(lambda: reception.receive(5.0), lambda: visit(config, local(1)))
    assert time.monotonic() - began < 5.0
    assert ours == theirs
    assert ours.verdict == "ok", [found for found in ours.findings if found.verdict != "ok"]
    assert [(link.source, link.target, link.error) for link in ours.links] == [(0, 1, ""), (1, 0, "")]
    assert all(0 < link.latency < 0.1 and link.bytes_per_second > 1e7 for link in ours.links)
    assert finding(ours, "clocks").verdict == "ok"


@pytest.mark.slow
def test_a_layout_that_the_model_does_not_allow(config: EngineConfig) -> None:
    wide = dataclasses.replace(config, parallel=ParallelConfig(tensor_parallel_size=99))
    ours, _ = run_both(lambda: examine.Reception(TOKEN, wide, local(0)).receive(5.0), lambda: visit(wide, local(1)))
    found = finding(ours, "layout")
    assert found.verdict == "broken"
    assert found.text.startswith("tensor_parallel_size 99 does not work for this model")
    assert found.fix == "use 8"


def test_a_link_that_is_closed_is_named(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "answer", lambda *_: Measured(error="10.0.0.2 port 4: timed out"))
    reception = examine.Reception(TOKEN, config, local(0))
    ours, _ = run_both(lambda: reception.receive(5.0), lambda: visit(config, local(1)))
    assert ours.verdict == "broken"
    assert [one.where for one in ours.findings if one.item == "TCP"] == [
        "node 0 (a, 127.0.0.1) to node 1 (b, 127.0.0.1)",
        "node 1 (b, 127.0.0.1) to node 0 (a, 127.0.0.1)",
    ]


@pytest.mark.slow
def test_a_node_that_is_missing_or_wrong(config: EngineConfig) -> None:
    reception = examine.Reception(TOKEN, config, local(0))
    other = msgspec.structs.replace(local(1), node=7)

    def visit_in_vain() -> Report:
        stranger = NodeSocket(TOKEN, "127.0.0.1", config.cluster.master_port)
        stranger.send("not of the protocol")
        stranger.close()
        with pytest.raises(ValueError, match="--node-rank 7 is not below --nnodes 2"):
            visit(config, other)
        return visit(config, local(1), token="another-token-of-this-test")

    ours, theirs = run_both(lambda: reception.receive(1.5), visit_in_vain)
    assert "--node-rank 1 did not come within 1.5 s" in finding(ours, "nodes").text
    assert "the join tokens differ" in finding(theirs, "head").text


def test_a_head_that_is_away(config: EngineConfig) -> None:
    assert "no head answers at 127.0.0.1" in finding(visit(config, local(1), 0.3), "head").text


class NoAnswers:
    """Spares the test the import of torch in another process."""

    def collect(self, timeout: float) -> tuple[dict[str, str], str]:
        return {"portable": "a"}, ""


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_worst(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "KnownAnswers", NoAnswers)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--device", "cpu", "--port", str(port)]) == 2
        words = capsys.readouterr().out
        assert f"127.0.0.1 port {port}: Address already in use" in words
        assert "1 broken" in words
    assert main(["doctor", "nobody/has-this", "--device", "cpu", "--port", str(port), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "warning"
    fixes = [row["fix"] for row in report["findings"] if row["verdict"] == "warning"]
    assert [fix.split("`")[1:2] for fix in fixes] == [["shardline download nobody/has-this"]], fixes


def test_a_layout_that_does_not_work_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "KnownAnswers", NoAnswers)
    flags = ["doctor", "demo", "--device", "cpu", "--port", "0"]
    assert main([*flags, "-tp", "99"]) == 2
    assert "fix: use 8" in capsys.readouterr().out
    assert main([*flags, "-tp", "2", "--cpu-threads", "1", "--max-model-len", "auto"]) == 0
    assert "tokens of a request: up to 2,048" in capsys.readouterr().out
