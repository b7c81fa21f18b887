"""docs/from-vllm.md says what the tables of vLLM's flags and variables say."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scripts.from_vllm import PAGE, same_flags, with_tables

from shardline.cli.flags import engine_config
from shardline.cli.main import _with_command, build_parser
from shardline.config.vllm import vllm_options
from tests.e2e.serving import serve
from tests.forks import ForkServer

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_tables() -> None:
    assert with_tables(TEXT) == TEXT, "run python -m scripts.from_vllm"
    for name in ("--tensor-parallel-size", "--middleware", "--enforce-eager"):
        assert f"`{name}`" in TEXT
    assert not {name.removeprefix("--") for name in same_flags()} & {
        name for name, option in vllm_options().items() if option.takes != "keywords"
    }


@pytest.mark.parametrize("line", re.findall(r"^shardline (?!serve --config)(.*)$", TEXT, re.MULTILINE))
def test_the_commands_are_taken(line: str) -> None:
    args = build_parser().parse_args(_with_command(shlex.split(line, comments=True)))
    if args.command == "serve":
        engine_config(args)


def test_the_file_of_flags_is_taken(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    args = build_parser().parse_args(["serve", "--config", str(file)])
    assert engine_config(args).model.model == yaml.safe_load(text)["model"]


def with_demo(text: str) -> str:
    """A command or a program with the demo model in place of others, and no more than its positions."""
    return re.sub(r"Qwen/Qwen3-0\.6B|\bM\b", "demo", text).replace("--max-model-len 8192", "--max-model-len 2048")


@pytest.mark.slow
@pytest.mark.parametrize("line", re.findall(r"^shardline serve (.*)$", TEXT, re.MULTILINE))
def test_the_servers_start(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> None:
    [file] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "config.yaml").write_text(with_demo(file))
    monkeypatch.chdir(tmp_path)
    with serve(*shlex.split(with_demo(line), comments=True), forks=fork_server) as server:
        assert "startup complete" in server.output


@pytest.mark.slow
def test_the_clients_run(fork_server: ForkServer) -> None:
    lines = re.findall(r"^shardline ((?:chat|complete|bench serve) .*)$", with_demo(TEXT), re.MULTILINE)
    assert len(lines) == 3
    with serve("demo", "--max-num-seqs", "64", forks=fork_server) as server:
        for line in lines:
            words = shlex.split(line.replace("http://localhost:8000", server.url), comments=True)
            if words[0] == "bench":
                words += ["--base-url", server.url, "--random-input-len", "16", "--random-output-len", "4"]
            ran = subprocess.run(
                [sys.executable, "-m", "shardline", *words], capture_output=True, text=True, timeout=120
            )
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout.strip()


@pytest.mark.usefixtures("forked_engines")
def test_the_program_runs() -> None:
    [program] = re.findall(r"```python\n(.*?)```", with_demo(TEXT), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(PAGE), "exec"), {"__name__": "program"})
    assert printed.getvalue().strip()
