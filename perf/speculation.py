"""What drafts gain: `python -m perf.speculation`.

Engines with and without drafts run the same greedy requests in this process, in turns.

First by how often a guess is right. The guesses are not those of prompt lookup: they come from the answers, which are
known from a first run, and each is right with a given probability. So the figures do not depend on the text. For each
batch, this prints the tokens/s without drafts, and for each probability how many times as fast drafts are, as the
median of the rounds with the least and the most.

The same with a draft model of about 6% of the model's bytes, and with an EAGLE head for the model with more layers.
Their passes are computed, and their guesses are replaced.

Then on code that is edited: a prompt is a part of a source file of this repository, and its answer is the same with
names changed by a rule. The model computes everything, and the tokens of that answer are chosen in place of its own.

At last the demo model with its own draft model and its own EAGLE head on its own questions, with nothing replaced.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec
import torch
from perf.random_models import RandomModel, asked_models
from tokenizers import Tokenizer

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.speculative.ngram import PromptLookup
from shardline.messages.request import Request
from shardline.messages.step import SequenceResult
from shardline.runtime.features.base import RunningStep
from shardline.runtime.features.draft_model import DraftModel
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.sequences import WorkerSequence
from shardline.sampling_params import SamplingParams

BATCHES = (1, 8, 32)
PROBABILITIES = (0.0, 0.5, 0.8, 1.0)
DRAFT = {"method": "ngram", "num_speculative_tokens": 5}
PROMPT_LEN, OUTPUT_LEN = 128, 64
METHODS = ({"method": "suffix"}, {"method": "ngram", "num_speculative_tokens": 24, "prompt_lookup_max": 4})
EDITED_LEN = 384
SOURCE = Path(__file__).parents[1] / "src/shardline"
FILES = [file for file in sorted((SOURCE / "engine/scheduling").glob("*.py")) if file.stat().st_size]
DEMO, DEMO_LEN = SOURCE / "demo_model", 64
DEMO_BEGIN, DEMO_END = 1, 2
SMALL = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768} | dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads"), 4
)
"""What the draft model has in place of the model's own sizes."""
NUM_LAYERS = 28
"""Of the model whose sizes the dense one has, see `random_models`."""
RULE = {"sequence": "stream", "block": "page", "step": "turn", "token": "word"}


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


def run(
    engine: Engine, prompts: list[list[int]], output_len: int = OUTPUT_LEN, ends: tuple[int, ...] = ()
) -> tuple[float, dict[tuple[int, ...], list[int]]]:
    """Seconds for all prompts together, and their answers, which end at one of `ends`."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len)
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(
            Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, eos_token_ids=ends)
        )
    while engine.busy:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    seconds = time.perf_counter() - started
    return seconds, {tuple(prompt): answers[str(index)] for index, prompt in enumerate(prompts)}


@contextmanager
def guesses_of(oracle: Oracle) -> Iterator[None]:
    """Have drafts be those of the oracle; a draft model computes its own all the same."""
    result = DraftModel.result

    def replaced(draft: DraftModel, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        texts = {
            step.seq_id: sequence.tokens[: step.start + step.num_tokens - len(step.draft_token_ids)].tolist()
            for step, sequence in zip(running.plan.steps, running.stepped, strict=True)
        }
        return [
            msgspec.structs.replace(one, guesses=oracle.guess(texts[one.seq_id] + one.token_ids, len(one.guesses)))
            if one.guesses
            else one
            for one in result(draft, running, results)
        ]

    with (
        patch.object(PromptLookup, "find_continuation", lambda lookup, tokens, most: oracle.guess(tokens, most)),
        patch.object(DraftModel, "result", replaced),
    ):
        yield


def measure_draft_model(model: RandomModel) -> None:
    """As `measure`, with a small draft model of the same vocabulary."""
    with changed(model, SMALL) as small:
        measure(model, {"model": small, "num_speculative_tokens": 5}, "a draft model")


def measure_head(model: RandomModel) -> None:
    """As `measure`, with an EAGLE head, one layer of the model's own sizes, for the model with all of its layers: what
    a head costs prompts and guesses is as much as one of them."""
    with changed(model, {"num_hidden_layers": NUM_LAYERS}) as folder, changed(model, {"num_hidden_layers": 1}) as head:
        deep = dataclasses.replace(model, options=model.options | {"model": folder})
        measure(deep, {"method": "eagle", "model": head, "num_speculative_tokens": 5}, "an EAGLE head")


@contextmanager
def changed(model: RandomModel, sizes: dict[str, int]) -> Iterator[str]:
    """A folder with the model's configuration and other sizes."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((Path(model.options["model"]) / "config.json").read_text())
        (Path(folder) / "config.json").write_text(json.dumps({**config, **sizes}))
        yield folder


def measure(model: RandomModel, draft: dict[str, object], by: str) -> None:
    """Print a line for each batch and probability. Each probability has an engine of its own, since engines learn how
    often guesses are right."""
    oracle = Oracle()
    plain = start(model)
    drafting = {probability: start(model, speculative_config=draft) for probability in PROBABILITIES}
    with guesses_of(oracle):
        for batch in BATCHES:
            speeds: list[float] = []
            ratios: dict[float, list[float]] = {probability: [] for probability in PROBABILITIES}
            for round_ in range(model.rounds + 1):
                prompts = [prompt["prompt_token_ids"] for prompt in model.prompts(batch, PROMPT_LEN)]
                without, oracle.answers = run(plain, prompts)
                for probability, engine in drafting.items():
                    oracle.probability = probability
                    seconds, answers = run(engine, prompts)
                    assert answers == oracle.answers, "drafts change an answer"
                    if round_:  # the first one warms up
                        ratios[probability].append(without / seconds)
                if round_:
                    speeds.append(batch * OUTPUT_LEN / without)
            print(
                f"{model.name}, by {by}, {batch} sequences: {statistics.median(speeds):.0f} tokens/s without drafts",
                flush=True,
            )
            for probability, found in ratios.items():
                middle = statistics.median(found)
                print(
                    f"  guesses right {probability:.0%}: {middle:.2f} [{min(found):.2f}-{max(found):.2f}] x", flush=True
                )


@contextmanager
def answers_of(edits: dict[tuple[int, ...], list[int]]) -> Iterator[None]:
    """Have engines of this process choose the tokens of these answers, by prompt."""
    rows: list[WorkerSequence] = []
    plan, choose = Sampler.plan_sampling, Sampler.choose_best

    def plan_sampling(sequences: Sequence[WorkerSequence]) -> SamplingPlan:
        rows[:] = sequences
        return plan(sequences)

    def choose_best(sampler: Sampler, best: torch.Tensor) -> Sampled:
        sampled = choose(sampler, best)
        for row, sequence in enumerate(rows):
            answer = edits[tuple(sequence.tokens[: sequence.num_prompt_tokens].tolist())]
            known = sequence.num_tokens - sequence.num_prompt_tokens
            sampled.tokens[row] = answer[known] if known < len(answer) else 0
        return sampled

    with (
        patch.object(Sampler, "plan_sampling", staticmethod(plan_sampling)),
        patch.object(Sampler, "choose_best", choose_best),
    ):
        yield


def code_edits() -> dict[tuple[int, ...], list[int]]:
    """Answers by prompt: a part of each file, and the same by the rule."""
    tokenizer = Tokenizer.from_file(str(SOURCE / "demo_model/tokenizer.json"))
    edits = {}
    for file in FILES:
        text = file.read_text()
        edited = re.sub("|".join(RULE), lambda match: RULE[match[0]], text)
        prompt, answer = (tokenizer.encode(one).ids[:EDITED_LEN] for one in (text, edited))
        edits[tuple(prompt)] = answer
    return edits


def measure_edits(model: RandomModel) -> None:
    """Print a line for each method and batch: each prompt is new to the engines that draft."""
    edits = code_edits()
    for batch in (1, len(edits)):
        for method in METHODS:
            with answers_of(edits):
                plain, drafting = start(model), start(model, speculative_config=method)
                found = []
                prompts = [list(prompt) for prompt in edits]
                for first in range(0, len(prompts), batch):
                    part = prompts[first : first + batch]
                    without, expected = run(plain, part, EDITED_LEN)
                    seconds, answers = run(drafting, part, EDITED_LEN)
                    assert answers == expected, "drafts change an answer"
                    found.append(without / seconds)
            middle = statistics.median(found)
            print(
                f"{model.name}, code edits by {method['method']}, {batch} sequences: {middle:.2f} "
                f"[{min(found):.2f}-{max(found):.2f}] x",
                flush=True,
            )


def demo_prompts(count: int) -> list[list[int]]:
    """Questions to the demo model."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    begin, end = map(tokenizer.id_to_token, (DEMO_BEGIN, DEMO_END))
    lines = (DEMO / "conversations.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    texts = [f"{begin}<|user|>{question}{end}<|assistant|>" for question in questions[:count]]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def measure_demo(draft: dict[str, object], rounds: int = 20) -> None:
    """Print the acceptance of what drafts for the demo model, and the gain, for each batch."""
    options = {"model": "demo", "enable_prefix_caching": False}
    model = RandomModel("demo", options, rounds, random.Random(0))
    plain, drafting = start(model), start(model, speculative_config=draft)
    for batch in (1, 16):
        found: list[float] = []
        prompts = demo_prompts(48)
        for round_ in range(rounds + 1):
            parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
            seconds, texts = [], []
            # Whole rounds in turns: an engine that has just waited finds nothing of its own in the CPU's caches.
            for engine in (plain, drafting):
                runs = [run(engine, part, DEMO_LEN, (DEMO_END,)) for part in parts]
                seconds.append(sum(taken for taken, _ in runs))
                texts.append([answers for _, answers in runs])
            assert texts[0] == texts[1], "drafts change an answer"
            if round_:
                found.append(seconds[0] / seconds[1])
        counts = drafting.stats().drafts
        assert counts is not None
        middle = statistics.median(found)
        print(
            f"demo by {draft['model']}, {batch} sequences: {middle:.2f} [{min(found):.2f}-{max(found):.2f}] x, "
            f"{counts.num_accepted / max(1, counts.num_tokens):.0%} of {counts.num_tokens} guesses right so far",
            flush=True,
        )


def main() -> None:
    """Measure every model that the user asked for."""
    for model in asked_models(__doc__, rounds=3):
        measure(model, DRAFT, "lookup")
        if model.name == "dense":
            measure_draft_model(model)
            measure_head(model)
        measure_edits(model)
    for method, name in (("draft_model", "demo-draft"), ("eagle", "demo-eagle")):
        measure_demo({"method": method, "model": name, "num_speculative_tokens": 8})


if __name__ == "__main__":
    main()
