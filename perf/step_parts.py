"""Where the time of a batch of long prompts goes: `python -m perf.step_parts`.

A worker with random weights runs, in this process, the two kinds of steps of workload W6: a prompt of 2,048 tokens, and
decode steps of 16 sequences with as many keys. For each part of a step, this prints its time, and its rate as a share
of what the machine can do: the rate of a large bf16 product (`large_product`), and for decode also the rate at which
`torch.sum` reads. All of them are measured in turns, and figures are medians of the rounds.

The parts are the calls of kernels; "the rest" is Python, torch, and what lies between the calls. Whole decode steps are
replayed in one call, as in an engine, and their parts are measured in further steps, without the replay. The last line
adds up the steps of W6.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from perf.attention import COMMON_CONFIG, STEP_MODELS, large_product, read_call, seconds_per_call
from torch import Tensor

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.kernels.host.kernels import HostKernels
from shardline.messages.step import SequenceStart, SequenceStep, StepPlan, rank_steps
from shardline.runtime.layers.attention import AttentionLayer
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.runner import Runner
from shardline.runtime.worker import Worker
from shardline.sampling_params import SamplingParams

PROMPT_LEN, OUTPUT_LEN, SEQUENCES = 2048, 128, 16  # of W6
DECODE_STEPS = 8  # of a round
READ_BYTES = 512 << 20
SETTLE_SECONDS = 0.3  # after calls of torch, whose threads spin for a while
GREEDY = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)


@dataclass
class Part:
    """The work of some kernel calls."""

    seconds: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0
    """Bytes of weights, or of keys and values; 0: not counted."""


@dataclass
class Stopwatch:
    """Adds up kernel calls by part, while it is on."""

    config: dict[str, int]
    parts: dict[str, Part] = field(default_factory=dict)
    is_on: bool = False

    def watch(self) -> None:
        """Put a watch on all kernels that long prompts need."""
        for name, describe in (
            ("linear", self._describe_linear),
            ("linear_argmax", lambda x, panels, *_: ("LM head", 2.0 * x.shape[0] * panels.numel(), panels.nbytes)),
            ("paged_attention", self._describe_attention),
            ("rope_and_write_kv", lambda *_: ("RoPE, write keys and values", 0.0, 0.0)),
            ("rms_norm", lambda *_: ("norms", 0.0, 0.0)),
        ):
            setattr(HostKernels, name, staticmethod(self._timed(getattr(HostKernels, name), describe)))

    def _timed(
        self, kernel: Callable[..., object], describe: Callable[..., tuple[str, float, float]]
    ) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            started = time.perf_counter()
            result = kernel(*arguments)
            seconds = time.perf_counter() - started
            if self.is_on:
                name, flops, num_bytes = describe(*arguments)
                part = self.parts.setdefault(name, Part())
                part.seconds += seconds
                part.flops += flops
                part.num_bytes += num_bytes
            return result

        return run

    def _describe_linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, activation: str | None = None
    ) -> tuple[str, float, float]:
        (rows, depth), columns = x.shape, out.shape[1] * (1 if activation is None else 2)
        if activation is not None:
            name = "gate and up"
        elif depth == self.config["intermediate_size"]:
            name = "down"
        else:
            name = "O" if columns == self.config["hidden_size"] else "QKV"
        return name, 2.0 * rows * depth * columns, panels.nbytes

    def _describe_attention(
        self, query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, *_: object
    ) -> tuple[str, float, float]:
        counts = starts.diff()
        seen = int((counts * (lengths - counts) + counts * (counts + 1) // 2).sum())
        heads, dim = query.shape[1:]
        return "attention", 4.0 * seen * heads * dim, 4.0 * int(lengths.sum()) * keys.shape[1] * dim


class Steps:
    """A worker, and the steps that it runs."""

    def __init__(self, folder: str, threads: int, kv_token_bytes: int) -> None:
        pool_tokens = (SEQUENCES + 2) * (PROMPT_LEN + OUTPUT_LEN + 128)
        deployment = resolve_here(
            EngineConfig.from_options(
                model=folder,
                load_format="dummy",
                max_model_len=PROMPT_LEN + OUTPUT_LEN,
                max_num_batched_tokens=PROMPT_LEN,
                cpu_threads=threads,
                distributed_executor_backend="uni",
                kv_cache_memory=pool_tokens * kv_token_bytes,
            )
        )
        backend = open_backend(deployment.device, 0, threads)
        groups = make_single_rank_groups()
        worker = Worker(deployment, backend, groups)
        worker.load()
        for layer in worker.stage.layers:
            assert isinstance(layer.attention, AttentionLayer)
            assert layer.attention.pages is not None
            layer.attention.pages.keys.fill_(0.5)
            layer.attention.pages.values.fill_(0.5)
        cache = deployment.cache
        self._block_size = cache.block_size
        self._replaying = worker.runner
        self._eager = worker.make_runner(worker.kv_store, worker.stage.forward)
        blocks_each = -(-(PROMPT_LEN + OUTPUT_LEN) // cache.block_size)
        order = torch.randperm((SEQUENCES + 1) * blocks_each, generator=torch.Generator().manual_seed(0)) + 1
        self._blocks = order.view(SEQUENCES + 1, blocks_each).tolist()
        self._prompt = torch.randint(10, 30000, (PROMPT_LEN,), generator=torch.Generator().manual_seed(1)).tolist()
        self._next_id = 0

    def _start(self, count: int) -> list[SequenceStart]:
        ids = range(self._next_id, self._next_id + count)
        self._next_id += count
        return [SequenceStart(seq_id, self._prompt, PROMPT_LEN, GREEDY, 0, ()) for seq_id in ids]

    def run_prompt(self) -> float:
        """Seconds of a step that computes a whole prompt."""
        (start,) = starts = self._start(1)
        step = SequenceStep(start.seq_id, 0, PROMPT_LEN, [self._blocks[-1]], -1, True)
        seconds = _run(self._replaying, StepPlan(0, starts, [step], []))
        _run(self._replaying, StepPlan(0, [], [], [start.seq_id]))
        return seconds

    def run_decode(self, *, replayed: bool) -> float:
        """Seconds of a decode step of all sequences, each with a prompt's keys and some more."""
        runner = self._replaying if replayed else self._eager
        starts = self._start(SEQUENCES)
        times = []
        for number in range(1 + DECODE_STEPS):
            steps = [
                SequenceStep(start.seq_id, PROMPT_LEN - 1 + number, 1, [blocks if number == 0 else []], -1, True)
                for start, blocks in zip(starts, self._blocks, strict=False)
            ]
            times.append(_run(runner, StepPlan(0, [] if number else starts, steps, [])))
        _run(runner, StepPlan(0, [], [], [start.seq_id for start in starts]))
        return statistics.fmean(times[1:])


def _run(runner: Runner, plan: StepPlan) -> float:
    (rank_step,) = rank_steps([plan])
    started = time.perf_counter()
    runner.run_step(rank_step)
    return time.perf_counter() - started


@contextmanager
def all_threads(threads: int) -> Iterator[None]:
    """Let torch use as many threads as our kernels."""
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(1)
    time.sleep(SETTLE_SECONDS)


@dataclass
class Round:
    """What one round measured."""

    product_rate: float
    """FLOP/s."""
    read_rate: float
    """Bytes/s."""
    prompt_seconds: float
    prompt_parts: dict[str, Part]
    decode_seconds: float
    decode_parts: dict[str, Part]


def measure_round(steps: Steps, watch: Stopwatch, threads: int) -> Round:
    product, flops = large_product()
    product_rate = flops / seconds_per_call(product)
    with all_threads(threads):
        read_rate = READ_BYTES / seconds_per_call(read_call(READ_BYTES))
    watch.parts, watch.is_on = {}, True
    prompt_seconds, prompt_parts = steps.run_prompt(), watch.parts
    watch.is_on = False
    decode_seconds = steps.run_decode(replayed=True)
    watch.parts, watch.is_on = {}, True
    steps.run_decode(replayed=False)
    watch.is_on = False
    for part in watch.parts.values():  # of one step
        part.seconds, part.flops, part.num_bytes = (
            amount / (1 + DECODE_STEPS) for amount in (part.seconds, part.flops, part.num_bytes)
        )
    return Round(product_rate, read_rate, prompt_seconds, prompt_parts, decode_seconds, watch.parts)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def report(title: str, rounds: list[tuple[Round, float, dict[str, Part]]], *, reads: bool) -> list[str]:
    """The table of one kind of step, from its whole seconds and its parts in each round."""
    wholes = [whole for _, whole, _ in rounds]
    lines = [f"{title}: {spread([1e3 * whole for whole in wholes], '.1f')} ms"]
    names = sorted(rounds[0][2], key=lambda name: -statistics.median(parts[name].seconds for _, _, parts in rounds))
    for name in names:
        column = [(one, parts[name]) for one, _, parts in rounds]
        shares = [part.seconds / whole for whole, (_, part) in zip(wholes, column, strict=True)]
        line = f"  {name:28} {spread([1e3 * part.seconds for _, part in column], '8.1f'):28} ms {spread(shares, '.1%')}"
        if column[0][1].flops:
            rates = [part.flops / part.seconds for _, part in column]
            of_product = [rate / one.product_rate for rate, (one, _) in zip(rates, column, strict=True)]
            line += f"; {statistics.median(rates) / 1e9:.0f} GFLOP/s, {spread(of_product, '.2f')} x the large product"
        if reads and column[0][1].num_bytes:
            rates = [part.num_bytes / part.seconds for _, part in column]
            of_sum = [rate / one.read_rate for rate, (one, _) in zip(rates, column, strict=True)]
            line += f"; {statistics.median(rates) / 1e9:.1f} GB/s, {spread(of_sum, '.2f')} x torch.sum"
        lines.append(line)
    rest = [1e3 * (whole - sum(part.seconds for part in parts.values())) for _, whole, parts in rounds]
    return [*lines, f"  {'the rest':28} {spread(rest, '8.1f')} ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=STEP_MODELS, default="Qwen2.5-0.5B, 24 layers, GQA 14/2 x 64")
    options = parser.parse_args()
    config = STEP_MODELS[options.model]
    counts = {name: value for name, value in config.items() if isinstance(value, int)}
    dim = counts["hidden_size"] // counts["num_attention_heads"]
    kv_token_bytes = 2 * 2 * dim * counts["num_key_value_heads"] * counts["num_hidden_layers"]
    watch = Stopwatch(counts)
    watch.watch()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | COMMON_CONFIG))
        steps = Steps(folder, options.threads, kv_token_bytes)
    steps.run_decode(replayed=True)  # records the step
    rounds = [measure_round(steps, watch, options.threads) for _ in range(options.rounds)]
    print(f"{options.model}, {options.threads} threads")
    print(f"large product: {spread([one.product_rate / 1e9 for one in rounds], '.0f')} GFLOP/s")
    print(f"torch.sum: {spread([one.read_rate / 1e9 for one in rounds], '.1f')} GB/s")
    prompts = [(one, one.prompt_seconds, one.prompt_parts) for one in rounds]
    decodes = [(one, one.decode_seconds, one.decode_parts) for one in rounds]
    print("\n".join(report(f"a prompt of {PROMPT_LEN:,} tokens", prompts, reads=False)))
    print("\n".join(report(f"a decode step of {SEQUENCES} sequences", decodes, reads=True)))
    totals = [SEQUENCES * one.prompt_seconds + (OUTPUT_LEN - 1) * one.decode_seconds for one in rounds]
    print(f"W6 by these steps: {spread(totals, '.1f')} s")


if __name__ == "__main__":
    main()
