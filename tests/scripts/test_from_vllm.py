"""docs/from-vllm.md says what the tables of vLLM's flags and variables say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from scripts.from_vllm import PAGE, same_flags, with_tables

from shardline.cli.flags import engine_config
from shardline.cli.main import build_parser
from shardline.config.vllm import vllm_options

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
    args = build_parser().parse_args(shlex.split(line, comments=True))
    if args.command == "serve":
        engine_config(args)


def test_the_file_of_flags_is_taken(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    args = build_parser().parse_args(["serve", "--config", str(file)])
    assert engine_config(args).model.model == yaml.safe_load(text)["model"]
