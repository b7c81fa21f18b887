"""--speculative-config: what is read, and what is said about mistakes."""

from __future__ import annotations

import pytest

from shardline.config.engine import EngineConfig
from shardline.config.speculation import Speculation, parse_speculation


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "must be a JSON object like"),
        ("[1]", "must be a JSON object like"),
        ('{"method": "eagle", "num_speculative_tokens": 2}', "must be \"ngram\", the only one so far, got 'eagle'"),
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
        ('{"model": "x", "num_speculative_tokens": 2}', "must be \"ngram\", the only one so far, got the model 'x'"),
        ('{"method": "eagle3", "model": "x"}', "must be \"ngram\", the only one so far, got 'eagle3'"),
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
