"""Train the demo model until it knows every answer by heart, then write its weights.

One thread, fixed seeds, float32. The loss is on the answers only. The learning rate follows a cosine over a
fixed number of steps; training ends early once every sampled answer is right. A run can start from the
weights of another run, with a new optimizer and a new cosine. Run `prepare.py` first.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from dialogue import PLAIN_TEXT, Item, SmallTalk, load_items, load_small_talk
from evaluate import exact_match, load_model, report, rounded_to_bfloat16
from prepare import (
    ASSISTANT,
    BEGIN,
    CONFIG,
    DRAFT_CONFIG,
    END,
    MODEL_DIR,
    PAD,
    SEED,
    USER,
    new_model,
    write_weights,
)
from tokenizers import Tokenizer
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaForCausalLM

TOKENS_PER_BATCH = 512
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.98)
SECOND_TURN_SHARE = 0.2
"""Chance that a dialogue goes on with another question."""
MAX_DIALOGUE_TOKENS = 320
IGNORED = -100


@dataclass(frozen=True)
class Mixture:
    """The content of an epoch besides the facts in the chat format."""

    plain_share: float
    """Share of the facts that are plain text instead."""
    small_talk_repeats: int
    """How often each hand-written answer occurs. Their questions differ a lot."""


@dataclass(frozen=True)
class Example:
    """Token ids, and for each the id to predict after it, or IGNORED outside answers."""

    ids: list[int]
    targets: list[int]


class ExampleMaker:
    """Turns facts into token sequences, in the format of the chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def turn(self, question: str, answer: str) -> Example:
        prompt = [USER, *self.encode(question), END, ASSISTANT]
        return self.answered(prompt, self.encode(answer))

    def plain(self, name: str, answer: str) -> Example:
        prompt, continuation = PLAIN_TEXT
        return self.answered(self.encode(prompt.format(name)), self.encode(continuation.format(answer)))

    def answered(self, prompt: list[int], answer: list[int]) -> Example:
        targets = [IGNORED] * (len(prompt) - 1) + answer + [END, IGNORED]
        return Example([*prompt, *answer, END], targets)

    def dialogue(self, turns: list[Example]) -> Example:
        ids = [BEGIN, *(token for turn in turns for token in turn.ids)]
        targets = [IGNORED, *(target for turn in turns for target in turn.targets)]
        return Example(ids, targets)


class Curriculum:
    """Every fact once per epoch, each time with another question, in batches of examples of similar length."""

    def __init__(
        self,
        mixture: Mixture,
        items: list[Item],
        small_talk: list[SmallTalk],
        maker: ExampleMaker,
    ) -> None:
        self.mixture, self.items, self.small_talk, self.maker = mixture, items, small_talk, maker
        self.random = random.Random(SEED)
        self.decks: dict[str, list[str]] = {}

    def question(self, fact: Item | SmallTalk) -> str:
        """The next question of the fact's shuffled deck, so all phrasings occur equally often."""
        deck = self.decks.setdefault(fact.answer + fact.questions()[0], [])
        if not deck:
            deck += fact.questions()
            self.random.shuffle(deck)
        return deck.pop()

    def example(self, facts: Iterator[Item | SmallTalk], first: Item | SmallTalk) -> Example:
        if isinstance(first, Item) and self.random.random() < self.mixture.plain_share:
            return self.maker.dialogue([self.maker.plain(first.names[0], first.answer)])
        turns = [self.maker.turn(self.question(first), first.answer)]
        while self.random.random() < SECOND_TURN_SHARE:
            if sum(len(turn.ids) for turn in turns) >= MAX_DIALOGUE_TOKENS:
                break
            follow_up = next(facts, None)
            if follow_up is None:
                break
            turns.append(self.maker.turn(self.question(follow_up), follow_up.answer))
        return self.maker.dialogue(turns)

    def epoch(self) -> list[list[Example]]:
        facts: list[Item | SmallTalk] = [*self.items, *self.small_talk * self.mixture.small_talk_repeats]
        self.random.shuffle(facts)
        remaining = iter(facts)
        examples = [self.example(remaining, fact) for fact in remaining]
        examples.sort(key=lambda example: len(example.ids))
        batches: list[list[Example]] = []
        batch: list[Example] = []
        for example in examples:
            if (len(batch) + 1) * len(example.ids) > TOKENS_PER_BATCH and batch:
                batches.append(batch)
                batch = []
            batch.append(example)
        batches.append(batch)
        self.random.shuffle(batches)
        return batches

    def batches(self) -> Iterator[list[Example]]:
        while True:
            yield from self.epoch()


def loss_of(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens. Padding is at the end, so causal attention hides it."""
    width = max(len(example.ids) for example in batch)

    def padded(row: list[int], filler: int) -> list[int]:
        return row + [filler] * (width - len(row))

    ids = torch.tensor([padded(example.ids, PAD) for example in batch])
    targets = torch.tensor([padded(example.targets, IGNORED) for example in batch])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = targets != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then a cosine down to nearly zero."""

    num_steps: int
    peak: float

    def learning_rate(self, step: int) -> float:
        if step < WARMUP_STEPS:
            return self.peak * (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, self.num_steps - WARMUP_STEPS)
        return self.peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(
    model: LlamaForCausalLM,
    schedule: Schedule,
    mixture: Mixture,
    stop_after: int,
    check_every: int,
    checkpoints: Path | None,
) -> None:
    """Train the model in place. Every `check_every` steps, it answers a sample of the questions."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    items, small_talk = load_items(), load_small_talk()
    curriculum = Curriculum(mixture, items, small_talk, ExampleMaker(tokenizer))
    sample = random.Random(SEED).sample(items, 200)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=schedule.peak,
        betas=BETAS,
        fused=True,
    )
    model.train()
    average: float | None = None
    num_steps = min(stop_after, schedule.num_steps)
    progress = tqdm(range(num_steps), unit="step", dynamic_ncols=True, mininterval=5)
    for step, batch in zip(progress, curriculum.batches(), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        progress.set_postfix(loss=f"{average:.3f}", refresh=False)
        if (step + 1) % check_every == 0:
            questions = [(item.questions()[step % len(item.questions())], item.answer) for item in sample]
            right = exact_match(rounded_to_bfloat16(model), tokenizer, questions)
            tqdm.write(f"step {step + 1}: loss {average:.4f}, {right:.1%} of {len(sample)} answers right")
            if checkpoints:
                checkpoints.mkdir(parents=True, exist_ok=True)
                write_weights(model, checkpoints / f"step{step + 1}.safetensors")
            if right == 1.0 and average < 0.01:
                break
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and write its weights.")
    parser.add_argument("--steps", type=int, default=7200, help="length of the learning-rate schedule")
    parser.add_argument("--stop-after", type=int, default=1_000_000, help="end before the schedule does")
    parser.add_argument("--peak-learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--plain-share", type=float, default=0.08)
    parser.add_argument("--small-talk-repeats", type=int, default=3)
    parser.add_argument("--start-from", type=Path, help="weights to go on from, instead of random ones")
    parser.add_argument("--check-every", type=int, default=600)
    parser.add_argument("--checkpoints", type=Path, help="folder for weights at every check")
    parser.add_argument("--draft", action="store_true", help="train the draft model")
    parser.add_argument("--output", type=Path, help="where the weights go; default: into the package")
    arguments = parser.parse_args()
    folder = MODEL_DIR / "draft" if arguments.draft else MODEL_DIR
    output = arguments.output or folder / "model.safetensors"
    torch.set_num_threads(1)
    start = time.perf_counter()
    model = (
        load_model(arguments.start_from)
        if arguments.start_from
        else new_model(DRAFT_CONFIG if arguments.draft else CONFIG)
    )
    schedule = Schedule(arguments.steps, arguments.peak_learning_rate)
    mixture = Mixture(arguments.plain_share, arguments.small_talk_repeats)
    train(model, schedule, mixture, arguments.stop_after, arguments.check_every, arguments.checkpoints)
    print(f"trained in {(time.perf_counter() - start) / 60:.1f} minutes")
    write_weights(model, output)
    if not arguments.draft:  # perf/speculation.py says how well that one guesses
        report(output)


if __name__ == "__main__":
    main()
