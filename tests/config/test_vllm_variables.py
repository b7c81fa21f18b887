"""What becomes of vLLM's variables."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from shardline.cli.flags import engine_config
from shardline.cli.main import build_parser
from shardline.config.vllm import find_variable, note_variables, options_from_variables, variable_table

NAMES: list[str] = json.loads((Path(__file__).parent / "vllm_variables.json").read_text())
"""Every VLLM_* variable of 0.32, as vLLM's table of them says."""

OLD_NAMES = (
    "VLLM_ALLOWED_MEDIA_DOMAINS", "VLLM_ATTENTION_BACKEND", "VLLM_ENGINE_ITERATION_TIMEOUT_S",
    "VLLM_MM_HASHER_ALGORITHM", "VLLM_OBJECT_STORAGE_SHM_BUFFER", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL",
)  # fmt: skip
"""Variables that versions from 0.29 on had, and 0.32 has not."""


def test_every_variable_of_vllm_is_known() -> None:
    assert [name for name in (*NAMES, *OLD_NAMES) if find_variable(name) is None] == []


def test_every_entry_has_a_variable() -> None:
    found = {id(find_variable(name)) for name in (*NAMES, *OLD_NAMES)}
    assert [entry.reason for entry in variable_table() if id(entry) not in found] == []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("VLLM_USE_DEEP_GEMM", "1", "has no effect: the device decides which kernels run"),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "is used: the level of the log"),
        ("VLLM_MAX_N_SEQUENCES", "16384", "has no effect: at most 128 choices"),
        ("VLLM_USE_MODELSCOPE", "False", "has no effect"),
        ("VLLM_PORT_8000_TCP", "tcp://10.0.0.1:8000", "is not known, and has no effect"),
    ],
)
def test_a_variable_gets_one_line(name: str, value: str, says: str) -> None:
    [line] = note_variables({name: value})
    assert line.startswith(f"the variable {name} {says}")
    assert note_variables({name: ""}) == []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("VLLM_MAX_N_SEQUENCES", "16", "the bound is fixed here"),
        ("VLLM_MAX_COMPLETION_PROMPTS", "8", "is set, but"),
        ("VLLM_USE_MODELSCOPE", "True", "models come from folders"),
        ("VLLM_DP_RANK", "1", "one head starts"),
        ("VLLM_ADMIN_KEY", "x", "seems to protect the server"),
    ],
)
def test_what_would_change_or_unprotect_something_ends_the_start(name: str, value: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        note_variables({name: value})


def test_variables_set_options_that_flags_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    config = engine_config(build_parser().parse_args(["serve", "demo", "-pp", "2"]))
    assert (config.cache.kv_cache_memory, config.parallel.pipeline_stages) == ("2GiB", "3,1")
    config = engine_config(build_parser().parse_args(["serve", "demo", "--kv-cache-memory", "1GiB"]))
    assert config.cache.kv_cache_memory == "1GiB"
    assert options_from_variables({"VLLM_CPU_KVCACHE_SPACE": "0"}) == {}
    with pytest.raises(ValueError, match="must be a whole number of GiB"):
        options_from_variables({"VLLM_CPU_KVCACHE_SPACE": "two"})


def test_the_level_of_the_log_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardline import env

    monkeypatch.delenv("SHARDLINE_LOG_LEVEL", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert logging.getLevelName(env.log_level()) == logging.DEBUG
    monkeypatch.setenv("SHARDLINE_LOG_LEVEL", "ERROR")
    assert env.log_level() == "ERROR"
