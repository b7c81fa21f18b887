"""The command line refuses invalid requests quickly, with exit code 2 and one line that says what would work."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint

REFUSALS: list[tuple[list[str], str]] = [
    (["no/such-model-here"], "no/such-model-here"),
    (["-tp", "9"], "use 8"),
    (["-pp", "9"], "8 or fewer"),
    (["--pipeline-stages", "4,5", "-pp", "2"], "add up to"),
    (["--max-model-len", "4096"], "2048"),
    (["--kv-cache-memory", "64KiB"], "--kv-cache-memory"),
    (["--kv-cache-memory", "lots"], "is not a size"),
    (["--cpu-threads", "4000"], "cores"),
    (["--context-parallel-size", "5"], "use 4 or less"),
    (["--device", "mps"], "device mps: torch finds none"),
    (["--device", "xpu", "--kernels", "torch"], "device xpu: torch finds none"),
    (["--kernels", "torch", "-q", "int8_w8a16"], "leave --kernels out"),
    (["--tensor-paralel-size", "2"], "--tensor-parallel-size"),
]
ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from shardline.cli.main import main

found = []
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(["serve", *arguments])
        except SystemExit as end:
            code = end.code
    found.append((code, errors.getvalue()))
json.dump(found, sys.stdout)
"""
"""What the command prints and its exit code, for each list of arguments. They share the imports."""


def the_error(code: int, errors: str) -> str:
    assert code == 2, errors
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if "error:" in line]
    return line


def refused(*arguments: str) -> str:
    """The error of `shardline serve` with these arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "shardline", "serve", *arguments], capture_output=True, text=True, timeout=30
    )
    return the_error(done.returncode, done.stderr)


def run_all(cases: Sequence[tuple[Sequence[str], str]]) -> dict[str, tuple[int, str]]:
    """By what the error for some arguments must say, the exit code of the command and what it printed."""
    given = json.dumps([arguments for arguments, _ in cases])
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER], input=given, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {says: found for (_, says), found in zip(cases, json.loads(done.stdout), strict=True)}


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[int, str]]:
    return run_all(REFUSALS)


@pytest.mark.parametrize("says", [says for _, says in REFUSALS])
def test_options(says: str, refusals: dict[str, tuple[int, str]]) -> None:
    assert says in the_error(*refusals[says])


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused("--port", str(port))


def test_checkpoints(tmp_path: Path) -> None:
    cut, misspelt, unknown, broken = (make_checkpoint("llama", tmp_path / str(number)) for number in range(4))
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    name = b"model.layers.2.mlp.up_proj.weight"
    (misspelt / "model.safetensors").write_bytes(
        whole.replace(name, b"model.layers.2.mlp.up_proj.wheight"[: len(name)])
    )
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    (broken / "config.json").write_text("{")
    cases = [
        ([str(cut)], "model.safetensors"),
        ([str(misspelt)], "model.layers.2.mlp.up_proj"),
        ([str(unknown)], "llama"),
        ([str(broken)], "config.json"),
    ]
    for says, found in run_all(cases).items():
        assert says in the_error(*found)
