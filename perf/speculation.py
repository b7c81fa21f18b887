"""What drafts gain, by how often a guess is right: `python -m perf.speculation`.

Engines with and without drafts run the same greedy requests in this process, in turns. The guesses are not those of
prompt lookup: they come from the answers, which are known from a first run, and each is right with a given probability.
So the figures do not depend on the text. For each batch, this prints the tokens/s without drafts, and for each
probability how many times as fast drafts are, as the median of the rounds with the least and the most.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from unittest.mock import patch

from perf.random_models import RandomModel, asked_models

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.speculative.ngram import PromptLookup
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams

BATCHES = (1, 8, 32)
PROBABILITIES = (0.0, 0.5, 0.8, 1.0)
DRAFT = {"method": "ngram", "num_speculative_tokens": 5}
PROMPT_LEN, OUTPUT_LEN = 128, 64


class Oracle:
    """Guesses from known answers."""

    def __init__(self) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}
        """By prompt."""
        self.probability = 0.0
        self._dice = random.Random(0)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """The next tokens, each of which is wrong with the given probability."""
        answer = self.answers[tuple(tokens[:PROMPT_LEN])]
        known = len(tokens) - PROMPT_LEN
        right = answer[known : known + most]
        return [token if self._dice.random() < self.probability else token ^ 1 for token in right]


def start(model: RandomModel, **options: object) -> Engine:
    """An engine in this process, with all cores."""
    setup = resolve_here(EngineConfig.from_options(**model.options, **options))
    executor = make_executor(setup)
    executor.start()
    return Engine(setup, executor)


def run(engine: Engine, prompts: list[list[int]]) -> tuple[float, dict[tuple[int, ...], list[int]]]:
    """Seconds for all prompts together, and their answers."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while engine.busy:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    seconds = time.perf_counter() - started
    return seconds, {tuple(prompt): answers[str(index)] for index, prompt in enumerate(prompts)}


def measure(model: RandomModel) -> None:
    """Print a line for each batch and probability."""
    oracle = Oracle()
    plain, drafting = start(model), start(model, speculative_config=DRAFT)
    with patch.object(PromptLookup, "find_continuation", lambda lookup, tokens, most: oracle.guess(tokens, most)):
        for batch in BATCHES:
            speeds: list[float] = []
            ratios: dict[float, list[float]] = {probability: [] for probability in PROBABILITIES}
            for round_ in range(model.rounds + 1):
                prompts = [prompt["prompt_token_ids"] for prompt in model.prompts(batch, PROMPT_LEN)]
                without, oracle.answers = run(plain, prompts)
                for probability in PROBABILITIES:
                    oracle.probability = probability
                    seconds, answers = run(drafting, prompts)
                    assert answers == oracle.answers, "drafts change an answer"
                    if round_:  # the first one warms up
                        ratios[probability].append(without / seconds)
                if round_:
                    speeds.append(batch * OUTPUT_LEN / without)
            print(
                f"{model.name}, {batch} sequences: {statistics.median(speeds):.0f} tokens/s without drafts", flush=True
            )
            for probability, found in ratios.items():
                middle = statistics.median(found)
                print(
                    f"  guesses right {probability:.0%}: {middle:.2f} [{min(found):.2f}-{max(found):.2f}] x", flush=True
                )


def main() -> None:
    """Measure every model that the user asked for."""
    for model in asked_models(__doc__, rounds=3):
        measure(model)


if __name__ == "__main__":
    main()
