"""Which nodes a head accepts: each refusal names both values, and what would work."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from shardline.cluster.describe import _digest_weights, own_address
from shardline.cluster.members import Members
from shardline.config.engine import EngineConfig
from shardline.messages.node import Join
from tests.cluster.joins import node, peer, start

PEERS = {name: peer() for name in "abcx"}


def test_nodes_join_in_any_order_and_come_back(own: Join) -> None:
    members = Members(start(own))
    assert members.missing() == "nodes 1, 2 (--node-rank)"
    second = members.add(PEERS["b"], node(own, 2))
    assert members.missing() == "node 1 (--node-rank)"
    first = members.add(PEERS["a"], node(own, 1))
    assert members.missing() == ""
    assert [join.node for join in members.settle()] == [1, 2]
    assert [members.at_index(host) for host in range(4)] == [None, first, second, None]
    assert members.host_of(second) == 2
    assert members.find(PEERS["a"]) is first
    members.remove(first)
    assert members.at_index(1) is None
    assert members.find(PEERS["a"]) is None
    assert members.missing() == "node 1 (--node-rank)"
    again = members.add(PEERS["c"], node(own, 1))
    assert members.at_index(1) is again


def test_nodes_that_say_which_replicas_they_run(own: Join) -> None:
    head = replace(own, host=replace(own.host, num_replicas=2))
    members = Members(start(head, nodes=(), num_replicas=5))
    assert members.missing() == "nodes for 3 of 5 replicas (--data-parallel-size-local)"
    with pytest.raises(ValueError, match="replicas 1 to 2 overlap with those of one, 0 to 1"):
        members.add(PEERS["x"], node(own, 1, host={"num_replicas": 2}))
    with pytest.raises(ValueError, match="replicas 4 to 5 are not all among the 5"):
        members.add(PEERS["x"], node(own, 4, host={"num_replicas": 2}))
    members.add(PEERS["b"], node(own, 4, host={"num_replicas": 1}))
    assert members.missing() == "nodes for 2 of 5 replicas (--data-parallel-size-local)"
    members.add(PEERS["a"], node(own, 2, host={"num_replicas": 2}))
    assert not members.missing()
    assert [join.node for join in members.settle()] == [2, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flags": {"max-num-seqs": "7"}}, "--max-num-seqs differs: the head has 128, host1 7"),
        ({"software": {"shardline": "9.9"}}, "shardline differs: the head has .*, host1 9.9"),
        ({"software": {"Triton": "9.9"}}, r"Triton differs: the head has \d+\.\d.*, host1 9.9"),
        ({"weights_digest": "other"}, "the models differ"),
        ({"isas": ("portable", "avx2")}, "computes with avx512, and host1 has portable, avx2: set SHARDLINE_ISA=avx2"),
    ],
)
def test_unlike_nodes_are_refused(own: Join, changes: dict[str, Any], message: str) -> None:
    for field in ("flags", "software"):
        if field in changes:
            changes = {field: {**getattr(own, field), **changes[field]}}
    with pytest.raises(ValueError, match=message):
        Members(start(own)).add(peer(), node(own, 1, **changes))


def test_fast_numerics_take_unlike_nodes(own: Join, caplog: pytest.LogCaptureFixture) -> None:
    flags = {**own.flags, "numerics": "fast"}
    members = Members(start(replace(own, flags=flags)))
    member = members.add(PEERS["a"], node(own, 1, flags=flags, isas=("portable", "avx2")))
    assert members.kernel_path(member) == "avx2"
    assert "computes with avx512, and host1 has portable, avx2" in caplog.text
    assert members.kernel_path(members.add(PEERS["b"], node(own, 2, flags=flags))) == "avx512"


def test_weights_that_differ_only_in_their_numbers_are_told_apart(tmp_path: Path) -> None:
    """As those of a fine-tuned model, whose config.json and headers are those of its base."""
    weights = bytearray(random.Random(0).randbytes(3 << 20))
    file = tmp_path / "model.safetensors"
    file.write_bytes(weights)
    base = _digest_weights((str(file),))
    weights[2 << 20 :] = bytes(value ^ 1 for value in weights[2 << 20 :])
    file.write_bytes(weights)
    assert _digest_weights((str(file),)) != base
    tiny = tmp_path / "tiny.safetensors"
    tiny.write_bytes(b"tiny")
    assert _digest_weights((str(tiny),)) == _digest_weights((str(tiny),))


def test_a_rank_that_is_taken_or_unknown_is_refused(own: Join) -> None:
    members = Members(start(own))
    members.add(PEERS["a"], node(own, 1))
    with pytest.raises(ValueError, match=r"--node-rank 1 is taken by host1 \(10.0.0.2\)"):
        members.add(PEERS["b"], node(own, 1))
    with pytest.raises(ValueError, match="--node-rank 3 is not one of this cluster's"):
        members.add(PEERS["b"], node(own, 3))


def test_only_flags_of_a_single_node_may_differ(own: Join) -> None:
    assert "max-model-len" in own.flags
    assert "nnodes" in own.flags
    assert not {"node-rank", "model", "cpu-threads", "join-token-file"} & own.flags.keys()


def test_an_address_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig.from_options(nnodes=2, master_addr="127.0.0.1").cluster
    with pytest.raises(ValueError, match=r"leads to 127\.0\.0\.1, which other nodes cannot reach"):
        own_address(config)
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.1.1")
    assert own_address(config) == "10.1.1.1"
    monkeypatch.delenv("VLLM_HOST_IP")
    with pytest.raises(ValueError, match=r"no\.such\.host cannot be reached"):
        own_address(dataclasses.replace(config, master_addr="no.such.host"))
