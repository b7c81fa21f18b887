"""The doctor on two hosts (network namespaces) with the commands of docs/operations.md."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hosts import Hosts


@pytest.fixture
def hosts() -> Any:
    with contextlib.closing(Hosts(2)) as hosts:
        yield hosts


def examine(hosts: Hosts, folder: Path) -> list[dict[str, Any]]:
    """The reports of both nodes."""
    flags = ("doctor", "demo", "--device", "cpu", "-pp", "2", "--nnodes", "2", "--master-addr", hosts.address(0))
    logs = [folder / name for name in ("head", "node")]
    nodes = [hosts.start(index, *flags, "--json", "--node-rank", str(index), log=log) for index, log in enumerate(logs)]
    codes = [node.wait(30) for node in nodes]
    reports = [json.loads(log.read_text()) for log in logs]
    assert codes == [{"ok": 0, "warning": 1, "broken": 2}[report["verdict"]] for report in reports]
    for log in logs:
        log.unlink()
    return reports


@pytest.mark.e2e
def test_two_hosts_and_a_slow_link(hosts: Hosts, tmp_path: Path) -> None:
    for rate, verdict in ((None, "ok"), ("100mbit", "warning")):
        if rate is not None:
            hosts.slow(1, rate)
        ours, theirs = examine(hosts, tmp_path)
        assert ours == theirs
        links = {row["item"]: row["verdict"] for row in ours["findings"] if " and " in row["where"]}
        assert links["TCP bandwidth"] == verdict, ours["links"]
        assert links["versions and flags"] == links["clocks"] == "ok"
