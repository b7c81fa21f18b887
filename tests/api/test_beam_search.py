"""Beam search against the enumeration of all outputs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from shardline.api.beam_search import BeamSearch, BeamSearchParams, run_searches, step_params
from shardline.api.llm import LLM
from shardline.api.logprob_counts import LogprobCounts
from shardline.api.outputs import CompletionOutput
from shardline.api.prompts import Prompt
from shardline.config.engine import EngineConfig
from shardline.messages.request import TokenLogprobs
from shardline.sampling_params import StructuredOutputsParams
from tests.api.fake_engine import FakeCluster, load_text

VOCABULARY = range(4)
EOS = 3
PROMPT = [0, 1]


def logprobs(tokens: Sequence[int]) -> list[float]:
    """Of each token, after these."""
    draw = random.Random(str(tokens))
    return [-draw.random() * 3 for _ in VOCABULARY]


def run_step(prompts: list[list[int]]) -> list[CompletionOutput]:
    outputs = []
    for tokens in prompts:
        values = logprobs(tokens)
        order = sorted(VOCABULARY, key=lambda token: -values[token])
        found = TokenLogprobs(values[order[0]], 1, order, [values[token] for token in order])
        outputs.append(CompletionOutput(index=0, token_ids=order[:1], token_logprobs=[found], finish_reason="length"))
    return outputs


def search(length: int = 3, **params: object) -> list[tuple[list[int], float]]:
    wanted = BeamSearchParams(**{"beam_width": 3, "max_tokens": length, **params})  # type: ignore[arg-type]
    one = BeamSearch(PROMPT, wanted, [EOS], 100)
    run_searches([one], run_step)
    return [(beam.token_ids, beam.cumulative_logprob) for beam in one.best()]


def every_output(length: int, *, ends: bool) -> list[tuple[list[int], float]]:
    """All outputs of up to this length."""
    outputs = []
    for size in range(1, length + 1):
        for tokens in itertools.product(VOCABULARY, repeat=size):
            if ends and (EOS in tokens[:-1] or (size < length and tokens[-1] != EOS)):
                continue
            if not ends and size < length:
                continue
            total = sum(logprobs(PROMPT + list(tokens[:place]))[token] for place, token in enumerate(tokens))
            outputs.append((list(tokens), total))
    return outputs


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_with_enough_beams_nothing_is_overlooked(length_penalty: float) -> None:
    found = search(beam_width=100, length_penalty=length_penalty)

    def score(output: tuple[list[int], float]) -> float:
        length = len(PROMPT) + len(output[0]) - (output[0][-1] == EOS)
        return output[1] / length**length_penalty

    expected = sorted(every_output(3, ends=True), key=score, reverse=True)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [total for _, total in found] == pytest.approx([total for _, total in expected])


def test_few_beams_are_the_best_of_each_step() -> None:
    found = search(beam_width=1, ignore_eos=True)
    tokens: list[int] = []
    for _ in range(3):
        values = logprobs(PROMPT + tokens)
        tokens.append(max(VOCABULARY, key=values.__getitem__))
    assert [output for output, _ in found] == [tokens]
    assert search(beam_width=64, ignore_eos=True)[0][1] == pytest.approx(
        max(total for _, total in every_output(3, ends=False))
    )


def test_a_failed_step_ends_the_search() -> None:
    one = BeamSearch(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2), [EOS], 100)
    with pytest.raises(RuntimeError, match="a step of beam search has failed: no memory"):
        one.advance([CompletionOutput(index=0, finish_reason="error", error="no memory")])


def test_parameters() -> None:
    assert step_params(BeamSearchParams(beam_width=3, max_tokens=9), 5, LogprobCounts(100, 6)).logprobs == 6
    assert step_params(BeamSearchParams(beam_width=50, max_tokens=9), 5, LogprobCounts(100, -1)).logprobs == 100
    for counts, most in ((LogprobCounts(100, 7), 3), (LogprobCounts(100, -1), 50), (LogprobCounts(100, 0), 0)):
        with pytest.raises(ValueError, match=f"beam_width must be at most {most}, got {most + 1}"):
            step_params(BeamSearchParams(beam_width=most + 1, max_tokens=4), 5, counts)
    with pytest.raises(ValueError, match="at least 1, got 0 and 4"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    with pytest.raises(ValueError, match="not supported with beam search"):
        BeamSearchParams(beam_width=1, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a"))


def test_searches_of_an_llm_have_the_prompt() -> None:
    cluster = FakeCluster()
    with LLM.from_config(EngineConfig.from_options(), connect=cluster, load_text=load_text) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        prompts: list[Prompt] = ["the dog", [5, 6]]
        first, second = llm.beam_search(prompts, params, concurrency_limit=1)
        [best] = first.sequences
        assert best.text.startswith("the dog")
        steps = zip(best.logprobs, best.tokens[-3:], strict=True)
        assert best.cum_logprob == sum(entries[token].logprob for entries, token in steps)
        assert second.sequences[0].tokens[:2] == [5, 6]
        with pytest.raises(ValueError, match="beam_width must be at most 10, got 11"):
            llm.beam_search("the dog", BeamSearchParams(beam_width=11, max_tokens=3))
