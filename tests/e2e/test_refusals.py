"""The command line refuses invalid requests quickly, with exit code 2 and one line that says what would work."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint


def refused(*arguments: str) -> str:
    """The error of `shardline serve` with these arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "shardline", "serve", *arguments], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "error:" in line]
    return line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no/such-model-here"], "no/such-model-here"),
        (["-tp", "9"], "use 8"),
        (["-pp", "9"], "8 or fewer"),
        (["--pipeline-stages", "4,5", "-pp", "2"], "add up to"),
        (["--max-model-len", "4096"], "2048"),
        (["--kv-cache-memory", "64KiB"], "--kv-cache-memory"),
        (["--kv-cache-memory", "lots"], "is not a size"),
        (["--dtype", "float16"], "bfloat16"),
        (["--cpu-threads", "4000"], "cores"),
        (["--context-parallel-size", "2"], "not supported yet"),
        (["--tensor-paralel-size", "2"], "--tensor-parallel-size"),
    ],
)
def test_options(arguments: list[str], says: str) -> None:
    assert says in refused(*arguments)


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused("--port", str(port))


def test_checkpoints(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "llama")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in refused(str(model))

    weights.write_bytes(whole.replace(b"model.layers.2.mlp.up_proj.weight", b"model.layers.2.mlp.up_proj.wheight"[:33]))
    assert "model.layers.2.mlp.up_proj" in refused(str(model))

    weights.write_bytes(whole)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    assert "llama" in refused(str(model))

    (model / "config.json").write_text("{")
    assert "config.json" in refused(str(model))
