"""What watermarks cost and prove: `python -m perf.watermark [MODEL]`.

For each scheme, with its usual parameters and random keys: p-values of marked answers, their perplexity under the model
itself beside that of answers without a mark, whether p-values of answers without a mark are uniform, and the time of a
marked token in a vocabulary of usual size.

Answers go on for 200 tokens at temperature 1, whatever they say, from prompts of a few words. Those for the test of
uniform p-values are shorter, since there are more of them; a scheme takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardline import LLM, SamplingParams
from shardline.api.model_text import load_model_text
from shardline.config.engine import EngineConfig
from shardline.runtime.features.watermark import GreenMark, Mark, TournamentMark
from shardline.watermark import SCHEMES, Scheme
from shardline.watermark.detector import Detection, binomial_tail, detect
from shardline.watermark.keys import KGWKey, SynthIDKey, WatermarkKey, new_key, read_key, write_key

LENGTH, PLAIN_LENGTH = 200, 64
PROMPTS = (
    "Tell me about the sea.",
    "Once upon a time",
    "The city was",
    "def main(",
    "It is known that",
    "In the morning",
)
VOCAB_SIZES = (32_000, 151_936)
_ROUNDS = 30


Answers = list[tuple[list[int], float]]
"""The tokens of each, and their mean log probability."""


def generate(llm: LLM, count: int, length: int = LENGTH) -> Answers:
    """So many answers of a length; the engine's key marks them, if it has one."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, seed=seed, logprobs=0)
        for seed in range(count)
    ]
    outputs = llm.generate([PROMPTS[index % len(PROMPTS)] for index in range(count)], params)
    answers = [output.outputs[0] for output in outputs]
    return [(list(answer.token_ids), (answer.cumulative_logprob or 0.0) / length) for answer in answers]


def uniform_p(found: Detection, ratio: float, dice: random.Random) -> float:
    """A p-value that is continuous if the text has no mark: a number of green tokens has steps, so it is drawn between
    the p of that number and the p of the next one."""
    if found.scheme != "kgw":
        return found.p_value
    above = binomial_tail(round(found.score * found.num_counted) + 1, found.num_counted, ratio)
    return above + dice.random() * (found.p_value - above)


def kolmogorov(values: Sequence[float]) -> tuple[float, float]:
    """The distance of values from the uniform distribution (Kolmogorov and Smirnov's), and its p-value."""
    ordered, count = sorted(values), len(values)
    distance = max(max(value - n / count, (n + 1) / count - value) for n, value in enumerate(ordered))
    scaled = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    tail = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, tail))


def perplexity(answers: Answers) -> str:
    """The perplexity of answers under the model itself, with its standard error."""
    means = [-mean for _, mean in answers]
    center, error = statistics.fmean(means), statistics.stdev(means) / math.sqrt(len(means))
    return f"{math.exp(center):.2f} +- {math.exp(center) * error:.2f}"


def time_of_token(mark: Mark, vocab_size: int, sampling: SamplingParams, *, again: bool) -> float:
    """Seconds of CPU time to mark a row, the best of some; `again`: after tokens that have occurred before."""
    dice = np.random.default_rng(0)
    row, times = dice.normal(0.0, 3.0, vocab_size).astype(np.float32), []
    for number in range(_ROUNDS):
        tokens = dice.integers(0, vocab_size, 500)
        tokens[-1] = 5 if again else number
        started = time.process_time()
        mark.edit(row.copy(), tokens, 100, sampling)
        times.append(time.process_time() - started)
    return min(times[1:])


def report(model: str, scheme: Scheme, unmarked: Answers, plain: Answers) -> None:
    """Print all figures of a scheme. `unmarked`: answers without a mark, to compare as many marked ones with; `plain`:
    those whose p-values should be uniform."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key.json"
        write_key(new_key(scheme), path)
        key = read_key(path)
        with LLM(model, watermark_config={"scheme": scheme, "key_file": str(path)}, max_model_len=512) as llm:
            marked = generate(llm, len(unmarked))
    vocab_size = load_model_text(EngineConfig.from_options(model=model)).vocab_size
    values = sorted(detect(ids, key, vocab_size).p_value for ids, _ in marked)
    found = sum(value < 1e-6 for value in values) / len(values)
    print(
        f"{scheme}: p of {len(values)} marked answers: median {values[len(values) // 2]:.1e}, below 1e-6: {found:.1%}"
    )
    print(f"{scheme}: perplexity {perplexity(marked)} marked, {perplexity(unmarked)} not", flush=True)
    dice = random.Random(0)
    keys: list[WatermarkKey] = [new_key(scheme) for _ in plain]
    ratio = key.greenlist_ratio if isinstance(key, KGWKey) else 0.0
    for what, used in (("a key of its own for each", keys), ("one key", [key] * len(plain))):
        p_values = [
            uniform_p(detect(ids, own, vocab_size), ratio, dice) for (ids, _), own in zip(plain, used, strict=True)
        ]
        distance, p_value = kolmogorov(p_values)
        print(f"{scheme}: {len(plain)} answers without a mark, {what}: distance {distance:.4f}, p {p_value:.3f}")


def report_times() -> None:
    """Print the time of a marked token."""
    usual, filtered = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)
    synthid = new_key("synthid")
    assert isinstance(synthid, SynthIDKey)
    for vocab_size in VOCAB_SIZES:
        green = GreenMark(KGWKey(hashing_key=15485863), vocab_size)
        selfhash = GreenMark(KGWKey(hashing_key=15485863, seeding_scheme="selfhash", context_width=4), vocab_size)
        tournament = TournamentMark(synthid)
        times = {
            "kgw, new context": time_of_token(green, vocab_size, usual, again=False),
            "kgw, known context": time_of_token(green, vocab_size, usual, again=True),
            "kgw, selfhash": time_of_token(selfhash, vocab_size, usual, again=False),
            "synthid": time_of_token(tournament, vocab_size, usual, again=False),
            "synthid, top_p": time_of_token(tournament, vocab_size, filtered, again=False),
        }
        for name, seconds in times.items():
            print(f"vocabulary of {vocab_size}: {name}: {1e3 * seconds:.2f} ms a token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--scheme", choices=SCHEMES, help="default: all")
    parser.add_argument("--marked", type=int, default=100, help="marked answers")
    parser.add_argument("--plain", type=int, default=1000, help="answers whose p-values should be uniform")
    parser.add_argument("--plain-length", type=int, default=PLAIN_LENGTH, help="their tokens")
    args = parser.parse_args()
    report_times()
    with LLM(args.model, max_model_len=512) as llm:
        unmarked, plain = generate(llm, args.marked), generate(llm, args.plain, args.plain_length)
    for scheme in SCHEMES if args.scheme is None else (args.scheme,):
        report(args.model, scheme, unmarked, plain)


if __name__ == "__main__":
    main()
