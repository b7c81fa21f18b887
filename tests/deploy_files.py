"""The commands in deploy/, with the variables that Kubernetes and systemd set filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
HEAD_ADDRESS = "10.0.0.1"
"""The address of the head in the examples."""


def leader_worker_set(address: str) -> list[list[str]]:
    """The arguments of the leader's and the worker's container, whose leader has this address."""
    documents: list[Any] = list(yaml.safe_load_all((DEPLOY / "leaderworkerset.yaml").read_text()))
    template = documents[0]["spec"]["leaderWorkerTemplate"]
    pods = []
    for index, part in enumerate(("leaderTemplate", "workerTemplate")):
        (container,) = template[part]["spec"]["containers"]
        given = {
            "LWS_GROUP_SIZE": str(template["size"]),
            "LWS_WORKER_INDEX": str(index),
            "LWS_LEADER_ADDRESS": address,
        }
        pods.append([_fill_in(word, given, r"\$\((\w+)\)") for word in container["args"]])
    return pods


def systemd_unit(address: str, rank: int, credentials: str) -> list[str]:
    """The arguments of `shardline` in the unit of a node, with the flags that the unit's first lines name."""
    unit = (DEPLOY / "shardline.service").read_text()
    (flags,) = re.findall(r"^#\s+SHARDLINE_FLAGS=(.*)$", unit, re.MULTILINE)
    (start,) = re.findall(r"^ExecStart=\S+/shardline (.*)$", unit, re.MULTILINE)
    flags = flags.replace(HEAD_ADDRESS, address).replace("--node-rank 0", f"--node-rank {rank}")
    # systemd splits the value of $NAME into words, but not that of ${NAME}.
    line = start.replace("$SHARDLINE_FLAGS", flags).split()
    return [_fill_in(word, {"CREDENTIALS_DIRECTORY": credentials}, r"\$\{(\w+)\}") for word in line]


def _fill_in(word: str, given: dict[str, str], pattern: str) -> str:
    return re.sub(pattern, lambda found: given[found[1]], word)
