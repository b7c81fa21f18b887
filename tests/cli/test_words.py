"""Command lines as vLLM takes them: a file of flags, parts of JSON, and -O3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.cli.flags import engine_config, fields_from_flags
from shardline.cli.main import build_parser
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig

FILE = """\
model: from/file
port: 8001
tensor-parallel-size: 4
served_model_name: [one, two]
enable-prefix-caching: false
enforce-eager: true
speculative-config: {method: ngram, num_speculative_tokens: 3}
seed: null
"""


def parse(words: str) -> tuple[EngineConfig, ServerConfig]:
    args = build_parser().parse_args(words.split())
    return engine_config(args), ServerConfig(**fields_from_flags(args, ServerConfig))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flags.yaml"
    path.write_text(FILE)
    return path


def test_flags_come_from_a_file(file: Path) -> None:
    engine, server = parse(f"serve --config {file}")
    assert engine.model.model == "from/file"
    assert engine.parallel.tensor_parallel_size == 4
    assert engine.scheduler.speculation.num_speculative_tokens == 3
    assert engine.cache.enable_prefix_caching is False
    assert engine.model.seed == 0
    assert (server.port, server.served_model_name) == (8001, ("one", "two"))


def test_the_command_line_comes_first(file: Path) -> None:
    words = f"serve given/model --config={file} -tp 2 --served-model-name three --enable_prefix_caching"
    engine, server = parse(words)
    assert engine.model.model == "given/model"
    assert engine.parallel.tensor_parallel_size == 2
    assert engine.cache.enable_prefix_caching is True
    assert (server.port, server.served_model_name) == (8001, ("three",))


def test_parts_of_json_are_joined() -> None:
    engine, _ = parse(
        "serve --speculative-config.method ngram --speculative-config.num_speculative_tokens=2 -O3 "
        '--hf-overrides {"a":{"b":1}} --hf_overrides.a.c=x --compilation-config.mode 3'
    )
    assert engine.scheduler.speculation.num_speculative_tokens == 2
    assert engine.model.config_overrides == {"a": {"b": 1, "c": "x"}}


@pytest.mark.parametrize(
    "words",
    [
        "--spec-method ngram --spec-tokens=3",
        '--spec_tokens 3 --speculative-config {"method":"ngram"}',
        "--speculative-config.method ngram --spec-tokens 3",
        '-sc {"method":"ngram"} --spec-tokens 3',
        '--speculative-config {"method":"suffix"} --speculative-config={"method":"ngram"} --spec-tokens 3',
        '--spec-tokens 2 --speculative-config {"method":"ngram"} --spec-tokens 3',
    ],
)
def test_flags_for_a_part_of_json_set_it(words: str) -> None:
    config = parse(f"serve {words}")[0].scheduler.speculative_config
    assert json.loads(config or "") == {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prt: 1", "unknown option --prt; did you mean --port?"),
        ("[1]", "must have flags and their values"),
        ("port: [1, 2]", "port takes one value, and no list"),
        ("served-model-name: [[a]]", "served-model-name has a list within a list"),
        ("a: [", "cannot be read"),
        (None, "cannot be read"),
        ("port: 1\n\nhost: h\nport: 2", "port is on line 1 and on line 4; keep one of them"),
        ("hf-overrides:\n  a: {b: 1, b: 1}", "b is on line 2 and on line 2; keep one of them"),
        ("max_model_len: 8\nmax-model-len: 9", "max_model_len and max-model-len are the same flag; give one of them"),
        ("enable-sleep-mode: true", "--enable-sleep-mode is not supported"),
    ],
)
def test_a_wrong_file_is_one_line(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "flags.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit:
        build_parser().parse_args(["serve", "--config", str(path)])
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert says in error
    assert error.count("\n") == 1


def test_a_part_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--speculative-config.method"])
    assert "--speculative-config.method needs a value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            '--spec-method ngram --speculative-config {"method":"suffix"}',
            "--spec-method is given twice, the other time as",
        ),
        ('-sc={"model":"a"} --spec-model=b', "--spec-model is given twice, the other time as 'model' in JSON"),
        (
            '--spec-tokens 3 -sc {"num_speculative_tokens":3}',
            "other time as 'num_speculative_tokens' in JSON; give it once",
        ),
        (
            '--eplb-config {"num_redundant_experts":1} --num-redundant-experts 2',
            "--num-redundant-experts is given twice",
        ),
        ("--spec-method ngram -sc.method ngram", "--spec-method and -sc.method are the same; give one of them"),
        ('--hf-overrides {"a":1} --hf-overrides.a.b 2', "--hf-overrides.a.b is given twice, the other time as 'a.b'"),
        ('--hf-overrides {"a":{"b":1}} --hf-overrides.a {"b":2}', "--hf-overrides.a is given twice"),
        ("-sc suffix --spec-tokens 3", "-sc must be a JSON object, since --spec-tokens is a part of it; got suffix"),
    ],
)
def test_a_part_of_json_that_is_given_twice_is_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        build_parser().parse_args(["serve", *words.split()])
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert says in error
    assert error.count("\n") == 1


def test_a_part_on_the_command_line_and_in_a_file_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(f"serve --config {file} --speculative-config.method suffix")[0].scheduler.speculative_config
    assert json.loads(config or "") == {"method": "suffix"}
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--config", str(file), "--spec-tokens", "5"])
    assert "--spec-tokens is given twice" in capsys.readouterr().err
