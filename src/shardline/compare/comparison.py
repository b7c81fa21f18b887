"""Ask two endpoints the same prompts in turn, and collect what is equal, what differs, and how long it took."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardline.compare.answers import Answer, Asker, Endpoint, Options
from shardline.compare.differences import Difference, deviation, first_difference

_RESAMPLES = 2000


@dataclass(frozen=True)
class Pair:
    """Both answers to a prompt."""

    prompt: str
    a: Answer
    b: Answer
    difference: Difference | None
    """None: the answers are equal, or one is missing."""
    deviation: float | None
    """The largest difference of a log probability up to there: 0.0 is equal bits; None: not known."""

    @property
    def error(self) -> str:
        """Why it could not be compared; empty: it was."""
        return "; ".join(f"{name}: {answer.error}" for name, answer in (("A", self.a), ("B", self.b)) if answer.error)

    @property
    def equal(self) -> bool:
        return not self.error and self.difference is None


@dataclass(frozen=True)
class Figure:
    """A median with its 95% interval, found by resampling prompts."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """What two endpoints answered. `names` has their addresses and models."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]

    @property
    def equal(self) -> bool:
        """Whether every answer has come, and is equal token by token."""
        return all(pair.equal for pair in self.pairs)

    @property
    def causes(self) -> dict[str, int]:
        """How many prompts differ for each cause."""
        return dict(Counter(pair.difference.cause for pair in self.pairs if pair.difference is not None))

    @property
    def num_same_bits(self) -> int:
        """Prompts whose log probabilities are all equal, bit for bit."""
        return sum(pair.equal and pair.deviation == 0.0 for pair in self.pairs)

    def speed(self) -> dict[str, tuple[Figure, Figure, Figure]]:
        """For each figure: A, B, and B divided by A, of the prompts that both have answered."""
        whole = [pair for pair in self.pairs if not pair.error]
        reads: dict[str, Callable[[Answer], float]] = {
            "TTFT (ms)": lambda answer: 1e3 * answer.ttft,
            "TPOT (ms)": lambda answer: 1e3 * answer.tpot,
            "tokens/s": lambda answer: answer.rate,
        }
        figures = {}
        for name, read in reads.items():
            values = np.array([[read(pair.a), read(pair.b)] for pair in whole if read(pair.a) and read(pair.b)])
            if len(values):
                figures[name] = _figures(values)
        return figures

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "a": self.names[0],
            "b": self.names[1],
            "equal": self.equal,
            "num_prompts": len(self.pairs),
            "num_equal": sum(pair.equal for pair in self.pairs),
            "num_same_bits": self.num_same_bits,
            "causes": self.causes,
            "speed": {
                name: {side: asdict(figure) for side, figure in zip(("a", "b", "ratio"), figures, strict=True)}
                for name, figures in self.speed().items()
            },
            "prompts": [
                {
                    "prompt": pair.prompt,
                    "equal": pair.equal,
                    "error": pair.error or None,
                    "deviation": None if pair.deviation == math.inf else pair.deviation,
                    "difference": None if pair.difference is None else asdict(pair.difference),
                    "texts": [pair.a.text, pair.b.text],
                }
                for pair in self.pairs
            ],
        }


async def compare_async(
    a: Endpoint,
    b: Endpoint,
    prompts: Sequence[str],
    options: Options | None = None,
    *,
    insecure: bool = False,
    on_pair: Callable[[Pair], object] | None = None,
    on_wait: Callable[[str], object] = lambda _: None,
) -> Comparison:
    """See `compare`. `on_wait` is told of an endpoint that is long silent."""
    options = options or Options()
    askers = [Asker(one, options, insecure=insecure, on_wait=on_wait) for one in (a, b)]
    try:
        for asker in askers:
            await asker.start()
        pairs = []
        for number, prompt in enumerate(prompts):
            # Each is asked first as often as the other, and never both at once, so that neither slows the other.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            answers = {side: await askers[side].ask(prompt) for side in order}
            pairs.append(_pair(prompt, answers[0], answers[1], greedy=options.temperature == 0))
            if on_pair is not None:
                on_pair(pairs[-1])
    finally:
        for asker in askers:
            asker.close()
    return Comparison((f"{askers[0].url} {askers[0].model}", f"{askers[1].url} {askers[1].model}"), tuple(pairs))


def compare(a: Endpoint, b: Endpoint, prompts: Sequence[str], options: Options | None = None) -> Comparison:
    """Ask two endpoints the same prompts, one at a time.

    Raises:
        ValueError: a URL is none.
        RuntimeError: an endpoint cannot be reached, or lists no model. What fails later is an error of its prompt.
    """
    return asyncio.run(compare_async(a, b, prompts, options))


def _pair(prompt: str, a: Answer, b: Answer, *, greedy: bool) -> Pair:
    if a.error or b.error:
        return Pair(prompt, a, b, None, None)
    difference = first_difference(a, b, greedy=greedy)
    count = len(a.tokens) if difference is None else difference.position + 1
    return Pair(prompt, a, b, difference, deviation(a, b, count))


def _figures(values: np.ndarray[Any, Any]) -> tuple[Figure, Figure, Figure]:
    """The medians of the columns A and B, and their ratio."""
    draws = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    medians = np.median(values[draws], axis=1)
    ratios = medians[:, 1] / medians[:, 0]
    middle = np.median(values, axis=0)
    centers = (middle[0], middle[1], middle[1] / middle[0])
    resampled = (medians[:, 0], medians[:, 1], ratios)
    return tuple(  # type: ignore[return-value]  # three of three
        Figure(float(center), float(np.percentile(found, 2.5)), float(np.percentile(found, 97.5)))
        for center, found in zip(centers, resampled, strict=True)
    )
