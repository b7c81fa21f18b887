"""Commands in deploy/ and in the pages for operators are commands that Shardline takes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardline.cli.flags import engine_config, fields_from_flags
from shardline.cli.main import build_parser
from shardline.cluster.ray.placing import RayHost, demand_of, share_groups
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.deploy_files import HEAD_ADDRESS, leader_worker_set, systemd_unit

ROOT = Path(__file__).parents[1]
PAGES = ("docs/operations.md", "docs/troubleshooting.md")
TOKEN = "a-token-of-these-tests-only"


def check(words: list[str]) -> EngineConfig | None:
    """Parse a command, and make the configurations of those that start engines."""
    args = build_parser().parse_args(words)
    if words[0] not in ("serve", "doctor"):
        return None
    ServerConfig(**fields_from_flags(args, ServerConfig))
    return engine_config(args)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page(page: str) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [
        shlex.split(line[line.index("shardline ") :], comments=True)[1:]
        for line in lines
        if " shardline " in f" {line}"
    ]
    commands = [words for words in commands if words and words[0] in ("serve", "doctor", "download", "plan", "bench")]
    assert len(commands) >= 5
    for words in commands:
        check(words)


@pytest.mark.parametrize("page", [*PAGES, "deploy/README.md"])
def test_files_and_flags_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert ((ROOT / page).parent / link).exists(), link
    known = set(re.findall(r"--[a-z][a-z-]+", build_parser().format_help()))
    for command in ("serve", "plan", "doctor", "download", "bench"):
        known |= _flags_of(command)
    others = {"--ipc", "--shm-size", "--ulimit", "--node-ip-address"}
    assert set(re.findall(r"`(--[a-z][a-z-]+)", text)) - others <= known


def _flags_of(command: str) -> set[str]:
    parser = build_parser()
    (commands,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    commands[command].complete()
    return {option for action in commands[command]._actions for option in action.option_strings}


@pytest.mark.parametrize(
    ("role", "flags"),
    [("--head", ["--nnodes", "2", "--host", "10.0.0.1"]), ("--worker", ["--nnodes", "2", "--node-rank", "1"])],
)
@pytest.mark.parametrize("has_token", [True, False])
def test_run_cluster(tmp_path: Path, role: str, flags: list[str], has_token: bool) -> None:
    tool = tmp_path / "docker"
    tool.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    script = ["bash", str(ROOT / "deploy/run_cluster.sh"), "shardline", "10.0.0.1", role, "/data/hf"]
    environment = {**os.environ, "HOME": str(tmp_path), "CONTAINER_TOOL": str(tool), "SHARDLINE_JOIN_TOKEN": ""}
    if has_token:
        environment["SHARDLINE_JOIN_TOKEN"] = TOKEN
    words = [*script, "-e", "A=b", "--", "org/m", "-tp", "8", "-pp", "2", *flags]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if role == "--worker" and not has_token:
        assert done.returncode == 2
        assert "copy" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    options = done.stdout.splitlines()
    split = options.index("shardline")
    assert TOKEN not in done.stdout
    assert options[options.index("-e") + 1] == "A=b"
    assert "/data/hf:/models" in options[:split]
    config = check(options[split + 1 :])
    assert config is not None
    assert config.cluster.is_headless == (role == "--worker")
    if not has_token:
        file = tmp_path / ".config/shardline/join-token"
        assert file.stat().st_mode & 0o777 == 0o600
        assert len(file.read_text()) >= 40


def test_run_cluster_says_how_it_is_used() -> None:
    for words in ([], ["image", "10.0.0.1", "--leader", "/hf", "--", "m"], ["image", "10.0.0.1", "--head", "/hf"]):
        done = subprocess.run(["bash", str(ROOT / "deploy/run_cluster.sh"), *words], capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_compose() -> None:
    file = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    configs = {name: check(service["command"].split()) for name, service in file["services"].items()}
    head, node = configs["head"], configs["node"]
    assert head is not None
    assert node is not None
    assert (head.cluster.is_headless, node.cluster.is_headless) == (False, True)
    assert head.parallel == node.parallel


def test_leader_worker_set() -> None:
    documents: list[Any] = list(yaml.safe_load_all((ROOT / "deploy/leaderworkerset.yaml").read_text()))
    template, commands = documents[0]["spec"]["leaderWorkerTemplate"], leader_worker_set(HEAD_ADDRESS)
    for index, part in enumerate(("leaderTemplate", "workerTemplate")):
        (container,) = template[part]["spec"]["containers"]
        config = check(commands[index])
        assert config is not None
        assert config.cluster.is_headless == bool(index)
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template[part]["spec"]["volumes"]}


def test_kuberay() -> None:
    documents: list[Any] = list(yaml.safe_load_all((ROOT / "deploy/kuberay.yaml").read_text()))
    spec = documents[0]["spec"]
    cluster = spec["rayClusterSpec"]
    config = check(spec["entrypoint"].split()[1:])
    assert config is not None
    assert config.places_with_ray
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    hosts = []
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert (
            group["template"]["metadata"]["labels"].items()
            >= documents[2]["spec"]["podSelector"]["matchLabels"].items()
        )
        gpus = float(container["resources"]["limits"]["nvidia.com/gpu"])
        hosts += [
            RayHost(f"{container['name']}{number}", f"10.0.0.{number}", {"GPU": gpus}, {"GPU": gpus})
            for number in range(group.get("replicas", 1))
        ]
    assert len(share_groups(demand_of(config, hosts), hosts, hosts[0].node_id)) == len(hosts)


def test_unit_and_image() -> None:
    check(systemd_unit(HEAD_ADDRESS, 0, "/run/credentials"))
    image = (ROOT / "deploy/Containerfile").read_text()
    (words,) = re.findall(r"^CMD (.*)$", image, re.MULTILINE)
    check(yaml.safe_load(words))
    pinned = re.findall(r"torch==([\d.]+)", image)
    assert pinned == re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
