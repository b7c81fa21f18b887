"""What becomes of vLLM's options."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import pytest

from shardline.cli.flags import engine_config
from shardline.cli.main import build_parser
from shardline.config.engine import EngineConfig, _long_aliases, option_names
from shardline.config.vllm import vllm_options

SERVE_FLAGS: dict[str, str] = json.loads((Path(__file__).parent / "vllm_serve_flags.json").read_text())
"""Each flag of `vllm serve` of 0.32, and what follows it, as vLLM's parser says."""


KEYWORDS: list[str] = json.loads((Path(__file__).parent / "vllm_keywords.json").read_text())
"""Each keyword of `LLM` and of `AsyncEngineArgs` of 0.32."""


def serve_parser() -> argparse.ArgumentParser:
    parser = build_parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    serve = commands.choices["serve"]
    serve.complete()
    return serve


def test_every_flag_of_vllm_is_known() -> None:
    known = serve_parser()._option_string_actions
    missing = sorted(flag for flag in SERVE_FLAGS if flag not in known)
    assert missing == []


def test_flags_take_as_many_words_as_those_of_vllm() -> None:
    known = serve_parser()._option_string_actions
    for takes, nargs in (("0", 0), ("?", "?")):
        expected = {flag for flag, one in SERVE_FLAGS.items() if one == takes}
        own = {flag for flag, action in known.items() if action.nargs == nargs and flag in SERVE_FLAGS}
        assert own == expected & known.keys()


def test_what_has_no_effect_is_taken_and_named(caplog: pytest.LogCaptureFixture) -> None:
    words = "serve demo --enforce-eager --no-async-scheduling --swap-space 4 --cudagraph-capture-sizes 1 2 -tp 2"
    args = build_parser().parse_args(words.split())
    with caplog.at_level(logging.INFO, "shardline"):
        config = engine_config(args)
    assert config.parallel.tensor_parallel_size == 2
    text = "\n".join(caplog.messages)
    for flag in ("--enforce-eager", "--no-async-scheduling", "--swap-space", "--cudagraph-capture-sizes"):
        assert f"{flag} has no effect: " in text


def test_what_is_not_there_can_be_turned_off() -> None:
    args = build_parser().parse_args(["serve", "demo", "--no-enable-sleep-mode", "--no-enable-flash-late-interaction"])
    assert engine_config(args).model.model == "demo"
    assert not hasattr(args, "vllm_notes")


def test_keywords_are_treated_as_flags(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardline"):
        config = EngineConfig.from_options(model="demo", enforce_eager=True, trust_remote_code=False, cpu_offload_gb=0)
    assert config.model.model == "demo"
    assert [message.partition(" ")[0] for message in caplog.messages] == ["enforce_eager"]
    with pytest.raises(ValueError, match="enable_moe_shared_loras is not supported yet: adapters change linears"):
        EngineConfig.from_options(enable_moe_shared_loras=True)
    with pytest.raises(ValueError, match="unknown option 'enforce_eagerly'"):
        EngineConfig.from_options(enforce_eagerly=True)


@pytest.mark.parametrize("whole", [{"method": "ngram"}, '{"method": "ngram"}', {}])
def test_keywords_for_a_part_of_json_set_it(whole: dict[str, str] | str) -> None:
    options = {"spec_tokens": 3, "speculative_config": whole, "eplb_config": {"window_size": 8}}
    given = options if whole else {**options, "spec_method": "ngram"}
    config = EngineConfig.from_options(**given, num_redundant_experts=2, enable_eplb=True, enable_expert_parallel=True)
    assert config.scheduler.speculation.num_speculative_tokens == 3
    assert json.loads(config.parallel.eplb_config or "") == {"window_size": 8, "num_redundant_experts": 2}


def test_what_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="spec_method is given twice, the other time as 'method' in JSON"):
        EngineConfig.from_options(spec_method="ngram", speculative_config={"method": "suffix"})
    with pytest.raises(ValueError, match="speculative_config must be a JSON object"):
        EngineConfig.from_options(spec_method="ngram", speculative_config="suffix")


def test_no_option_of_the_table_is_one_of_shardlines_own() -> None:
    own = {
        flag.lstrip("-")
        for flag, action in serve_parser()._option_string_actions.items()
        if type(action).__name__ != "_VllmFlag"
    }
    assert own.isdisjoint(name for name, option in vllm_options().items() if option.takes != "keywords")


def test_every_keyword_of_vllm_is_known() -> None:
    own = {*option_names(), *(other for _, other in _long_aliases()), "chat_template"}
    assert [name for name in KEYWORDS if name not in own and name.replace("_", "-") not in vllm_options()] == []


def test_keywords_have_the_names_of_flags() -> None:
    config = EngineConfig.from_options(kv_cache_memory_bytes=1 << 30, hf_token=True, hf_overrides={"a": {"b": 1}})
    assert config.cache.kv_cache_memory == 1 << 30
    assert config.model.hub_access.token is None
    assert config.model.config_overrides == {"a": {"b": 1}}
    assert EngineConfig.from_options(hf_token="x").model.hub_access.token == "x"
