"""--speculative-config: what is read, and what is said about mistakes."""

from __future__ import annotations

import pytest

from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from shardline.config.speculation import DraftModel, Speculation, Suffixes, parse_speculation


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lengths_are_those_of_vllm(lengths: dict[str, int], expected: tuple[int, int]) -> None:
    fields = {"method": "ngram", "num_speculative_tokens": 3, **lengths}
    config = EngineConfig.from_options(speculative_config=fields)
    assert config.scheduler.speculation == parse_speculation(fields) == Speculation(3, *expected)


def test_suffixes_are_those_of_vllm() -> None:
    config = EngineConfig.from_options(speculative_config={"method": "suffix"}, share_suffixes=True)
    assert config.scheduler.speculation == Speculation(24, 0, 0, Suffixes(24, 10_000, 1.0, 0.1, True))
    fields = {
        "method": "suffix",
        "num_speculative_tokens": 3,
        "suffix_decoding_max_tree_depth": 8,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0.5,
    }
    assert parse_speculation(fields) == Speculation(3, 0, 0, Suffixes(8, 0, 2.0, 0.5, False))
    with pytest.raises(ValueError, match="share_suffixes needs speculative_config"):
        EngineConfig.from_options(
            speculative_config={"method": "ngram", "num_speculative_tokens": 2}, share_suffixes=True
        )


def test_the_help_says_how_a_draft_model_gets_ranks_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert '"draft_ranks": 1' in " ".join(capsys.readouterr().out.split())


def test_a_model_is_enough_to_draft_by_it() -> None:
    fields = {"model": "small", "num_speculative_tokens": 3}
    config = EngineConfig.from_options(speculative_config=fields)
    assert config.scheduler.speculation == Speculation(3, 0, 0, draft=DraftModel("small"))
    more = {"method": "draft_model", "revision": "v2", "quantization": "int8", "draft_tensor_parallel_size": 2}
    assert parse_speculation({**fields, **more}) == Speculation(3, 0, 0, draft=DraftModel("small", "v2", "int8", 2))


def test_heads_are_methods() -> None:
    fields = {"method": "eagle", "model": "head", "num_speculative_tokens": 3}
    assert parse_speculation(fields) == Speculation(3, 0, 0, draft=DraftModel("head", method="eagle"))
    assert parse_speculation({"method": "mtp", "num_speculative_tokens": 1}) == Speculation(
        1, 0, 0, draft=DraftModel("", method="mtp")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "must be a JSON object like"),
        ("[1]", "must be a JSON object like"),
        (
            '{"method": "medusa", "num_speculative_tokens": 2}',
            'must be "ngram", "suffix", "draft_model", "eagle", "eagle3" or "mtp", got \'medusa\'',
        ),
        ('{"num_speculative_tokens": 2}', "got None"),
        (
            '{"method": "ngram"}',
            "num_speculative_tokens of speculative_config must be a whole number from 1 to 64, got nothing",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "from 1 to 64, got 0"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "from 1 to 64, got True"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3}',
            "is above",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 2, "draft_tp": 2}', "unknown key 'draft_tp'; known: method"),
        ('{"method": "eagle3"}', "model of speculative_config must be a text that is not empty, got nothing"),
        ('{"method": "eagle", "num_speculative_tokens": 2}', "model of speculative_config must be a text"),
        ('{"method": "eagle", "model": "x"}', "must be a whole number from 1 to 64, got nothing"),
        (
            '{"method": "mtp", "model": "x", "num_speculative_tokens": 2}',
            "drafts by layers of the served model: leave out the model 'x'",
        ),
        ('{"method": "mtp", "quantization": "int8", "num_speculative_tokens": 2}', "unknown key 'quantization'"),
        (
            '{"model": "x"}',
            "num_speculative_tokens of speculative_config must be a whole number from 1 to 64, got nothing",
        ),
        ('{"model": "x", "num_speculative_tokens": 65}', "from 1 to 64, got 65"),
        ('{"method": "draft_model", "num_speculative_tokens": 2}', "model of speculative_config must be a text"),
        ('{"model": 7, "num_speculative_tokens": 2}', "must be a text that is not empty, got 7"),
        ('{"model": "x", "num_speculative_tokens": 2, "prompt_lookup_max": 2}', "unknown key 'prompt_lookup_max'"),
        (
            '{"model": "x", "num_speculative_tokens": 2, "quantization": "int3"}',
            "quantization of speculative_config must be one of none, ",
        ),
        (
            '{"model": "x", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 0}',
            "draft_tensor_parallel_size of speculative_config must be a whole number",
        ),
        ('{"method": "suffix", "prompt_lookup_max": 2}', "unknown key 'prompt_lookup_max'; known: method, num_sp"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 0}', "whole number from 1 to 64, got 0"),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', "from 0 to 1000000, got -1"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": "2"}', "a number from 0 to 64, got '2'"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "a number from 0 to 1, got 2"),
        ('{"method": "suffix", "suffix_decoding_share": true}', "unknown key 'suffix_decoding_share'"),
        ('{"method": "ngram", "model": "x"}', "drafts from the text: leave out the model 'x'"),
    ],
)
def test_mistakes(given: str, message: str) -> None:
    with pytest.raises(ValueError, match="speculative_config") as error:
        EngineConfig.from_options(speculative_config=given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_prompts_that_are_embedded_have_no_drafts() -> None:
    with pytest.raises(ValueError, match="runner pooling makes none"):
        EngineConfig.from_options(runner="pooling", speculative_config={"method": "ngram", "num_speculative_tokens": 2})
