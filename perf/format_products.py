"""Products with packed weights compared with bf16: `python -m perf.format_products --model llama3b`.

For each form in which packed checkpoints are held, or dense weights with `--quantization`, it runs the linears of one
layer (qkv, o, gate and up, down) with M rows. It prints the time of bf16 divided by the form's, with the quartiles of
the rounds. For M = 1, it also prints the rate at which weights are read, as a share of the rate of a plain read. Forms
and bf16 are measured in turns, and each call uses the next of several copies of the layer, so weights come from memory,
as in a model. With `--threads 1` it measures the thread's CPU time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from perf.kernels import COLD_BYTES, KERNELS, read_bandwidth, seconds_per_call
from tests.weights.forms import FORMS, quantize

from shardline import _cpu
from shardline.weights.base import PackedLinear, Role, weight_format
from shardline.weights.formats import format_names, packed, plain
from shardline.weights.grouped import GroupedWeight, TwoLevels

MODELS = {
    "q05": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
    "llama1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],
    "llama3b": [(5120, 3072), (3072, 3072), (16384, 3072), (3072, 8192)],
}
"""[out_features, in_features] of a layer's linears: qkv, o, gate and up, down."""
ROLES: tuple[Role, ...] = ("attention", "attention", "layer", "down")
_OPTION = "--quantization="
SCHEMES = tuple(f"{_OPTION}{name}" for name in format_names() if name not in ("plain", "packed"))
"""Formats in which dense weights are held, as options of the command line name them."""
DEFAULT_FORMS = ("q4_0", "q4_k", "awq", "nf4", "mxfp4", "fp8", "fp8_block", "q8_0", "q6_k")


class Layer:
    """The linears of a layer in one form, several times, and the inputs of a step."""

    def __init__(self, form: str, shapes: list[tuple[int, int]]) -> None:
        first = [self._pack(form, *shape, place) for place, shape in enumerate(shapes)]
        self.nbytes = sum(linear.nbytes for linear in first)
        copies = max(1, COLD_BYTES // self.nbytes)
        others = [[self._pack(form, *shape, place) for place, shape in enumerate(shapes)] for _ in range(copies)]
        self._turn = cycle([first, *others])

    def run(self, inputs: list[torch.Tensor]) -> None:
        """One step with the next copy."""
        for linear, x in zip(next(self._turn), inputs, strict=True):
            linear(x)

    @staticmethod
    def _pack(form: str, n: int, k: int, place: int) -> PackedLinear:
        if form in ("bf16", *SCHEMES):
            chosen = plain.Format() if form == "bf16" else weight_format(form.removeprefix(_OPTION))
            weight = torch.randn(n, k).bfloat16()
            keys_values = n - k if place == 0 else 0
            parts = [
                chosen.hold(KERNELS, weight[: n - keys_values], ROLES[place]),
                chosen.hold(KERNELS, weight[n - keys_values :], "key_value"),
            ]
            return chosen.pack_linear(KERNELS, *(part for part in parts if len(part)))  # type: ignore[arg-type]
        return packed.Format().pack_linear(KERNELS, random_weight(form, n, k))


def random_weight(form: str, n: int, k: int) -> GroupedWeight:
    """A weight whose first rows are quantized, and repeated: the values do not matter for the time."""
    few = quantize(torch.randn(64, k), form)
    repeated = {
        part: getattr(few, part).repeat(n // 64, 1)
        for part in ("values", "scales", "zeros", "mins")
        if getattr(few, part) is not None
    }
    levels = {
        part: TwoLevels(found.inner.repeat(n // 64, 1), found.outer.repeat(n // 64, 1))
        for part in ("scale_levels", "min_levels")
        if (found := getattr(few, part)) is not None
    }
    return GroupedWeight(group_of=few.group_of, table=few.table, bits=few.bits, label=form, **repeated, **levels)


def measure(calls: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each call in each round; the calls take turns."""
    return list(map(list, zip(*([seconds_per_call(call) for call in calls] for _ in range(rounds)), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3b")
    parser.add_argument("--forms", nargs="+", choices=(*FORMS, *SCHEMES), default=DEFAULT_FORMS)
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 2, 4))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _cpu.set_num_threads(options.threads)
    shapes = MODELS[options.model]
    bandwidth = read_bandwidth(options.rounds)
    print(f"{options.model}, {options.threads} threads, {_cpu.isa()}, reads {bandwidth / 1e9:.1f} GB/s")
    dense = Layer("bf16", shapes)
    for form in options.forms:
        layer = Layer(form, shapes)
        for rows in options.rows:
            inputs = [torch.randn(rows, k).bfloat16() for _, k in shapes]
            ours, plain_times = measure([partial(layer.run, inputs), partial(dense.run, inputs)], options.rounds)
            ratios = sorted(theirs / own for own, theirs in zip(ours, plain_times, strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4)
            line = f"{form:16} M={rows:4d} {middle:5.2f} x bf16 ({low:.2f} to {high:.2f})"
            if rows == 1:
                rates = [one.nbytes / statistics.median(times) for one, times in ((layer, ours), (dense, plain_times))]
                shares = " and ".join(f"{rate / bandwidth:4.0%}" for rate in rates)
                line += f"; {layer.nbytes / dense.nbytes:.2f} of its bytes; {shares} of a plain read"
            print(line, flush=True)


if __name__ == "__main__":
    main()
