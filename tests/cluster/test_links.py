"""Links between hosts are measured one after another; what the report says about them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shardline.cluster.links import Survey, answer, describe_links, used_links
from shardline.cluster.members import Member, Members
from shardline.config.topology import GROUPS
from shardline.deployment.machine import Machine
from shardline.messages.node import Connect, Join, LinkMeasured, Listen, Measured
from shardline.models.communication import TRAFFIC, Traffic
from tests.cluster.joins import node, peer, start
from tests.deployment.machines import host, resolve_on


class Nodes:
    """Nodes on this host that do what the head says."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.survey: Survey
        self.silent = 0
        self.commands: list[tuple[Member, object]] = []

    def send(self, member: Member, message: object) -> None:
        """Stands for `Member.send`."""
        self.commands.append((member, message))

    def obey(self) -> None:
        """Answer all commands, and those that follow from the answers."""
        while self.commands:
            member, command = self.commands.pop(0)
            assert isinstance(command, (Listen, Connect))
            if member.join.node != self.silent:
                self.survey.handle(member, answer(command, "127.0.0.1"))


@pytest.fixture
def nodes(own: Join, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    members = Members(start(own))
    for number in (1, 2):
        members.add(peer(), node(own, number, host={"address": "127.0.0.1"}))
    members.settle()
    nodes = Nodes(members)
    monkeypatch.setattr(Member, "send", lambda member, message: nodes.send(member, message))
    return nodes


def test_all_links_are_measured_and_a_silent_node_is_left_out(nodes: Nodes) -> None:
    deployment = resolve_on(Machine((host(), host(), host())), pipeline_parallel_size=3)
    assert used_links(deployment) == [(0, 1), (0, 2), (1, 2)]
    for silent, broken in ((0, []), (1, [(0, 1), (1, 2)])):
        found: list[LinkMeasured] = []
        nodes.survey = Survey("127.0.0.1", nodes.members, found.append)
        nodes.silent = silent
        nodes.survey.start(deployment)
        for _ in range(4):
            nodes.obey()
            nodes.survey.check(float("inf"))
        assert [one.hosts for one in found] == [(0, 1), (0, 2), (1, 2)]
        assert [one.hosts for one in found if one.measured.error] == broken
        assert all(one.measured.latency > 0 < one.measured.bytes_per_second for one in found if not one.measured.error)


def test_late_answers_of_others_are_ignored(nodes: Nodes) -> None:
    found: list[LinkMeasured] = []
    survey = Survey("127.0.0.1", nodes.members, found.append)
    survey.handle(Member(peer(), nodes.members.present()[0].join), Measured(1.0, 1.0))
    assert not found


def test_the_report_says_what_tensor_parallelism_across_hosts_costs() -> None:
    machine = Machine(
        tuple(replace(host(name=name), address=f"10.0.0.{i}") for i, name in enumerate(("one", "two"), 1))
    )
    links = {(0, 1): Measured(200e-6, 1.25e9)}
    crossing = resolve_on(machine, tensor_parallel_size=2)
    line, warning = describe_links(crossing, links)
    assert line == "link one (10.0.0.1) - two (10.0.0.2): 200 µs a round trip, 10.00 Gb/s over one connection"
    count = 4 * len(crossing.spec.layers)
    assert f"{count} exchanges a token" in warning
    assert f"(100 µs), add {count * 0.1:.1f} ms to every token" in warning
    assert len(describe_links(resolve_on(machine, pipeline_parallel_size=2), links)) == 1
    assert "tensor parallelism crosses nodes" in warning
    assert warning.endswith("keep -tp inside a node, and use -pp or -dp across")
    assert "not measured: refused" in describe_links(crossing, {(0, 1): Measured(error="refused")})[0]


def test_a_further_axis_of_the_table_is_surveyed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = resolve_on(Machine((host(), host())), pipeline_parallel_size=2)
    links = {(0, 1): Measured(200e-6, 1.25e9)}
    assert len(describe_links(deployment, links)) == 1
    monkeypatch.setitem(GROUPS, "stages", ("pipeline",))  # type: ignore[misc]
    monkeypatch.setitem(TRAFFIC, "stages", lambda spec, layers, ranks, *_: Traffic(1.0, 7 * ranks))  # type: ignore[misc]
    assert describe_links(deployment, links)[1].startswith("stages parallelism crosses nodes: 14 exchanges a token")
    assert describe_links(deployment, links)[1].endswith("keep -pp inside a node, and use -dp across")
