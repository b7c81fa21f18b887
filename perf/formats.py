"""Packed checkpoints compared with llama.cpp on the same files, and with our bf16: `python -m perf.formats`.

It writes random checkpoints of Llama-3.2's shapes once, starts an engine for each format, and runs the workloads of
`shardline bench throughput` in turns. For each workload it prints how many times faster a format is than llama.cpp or
bf16, as the median of the rounds with the least and the most, and what we aim for. It also prints how much memory an
engine takes beyond 0.25 GB, as a multiple of the bytes of its weights.

Run nothing else on the machine meanwhile. `--llama-python` is the interpreter of llama.cpp's environment
(perf/peers/README.md); without it there are no ratios to llama.cpp.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from perf.format_models import FORMATS, checkpoint

from shardline.benchmark.workload import WORKLOADS

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from report import ratio

from compare import Engine, check_idle, measure, prompts_of, start

_LLAMA = "llama.cpp "
_TORCH_BYTES = 0.25e9
_MOST_MEMORY = 1.25


class Aim(NamedTuple):
    """How many times faster an engine should be than another."""

    shape: str
    form: str
    other: str
    workload: str
    least: float


def _aims() -> Iterator[Aim]:
    for form, peer in (("q4_0", "q4_0"), ("q4_k_m", "q4_k_m"), ("awq", "q4_0")):
        yield Aim("llama1b", form, _LLAMA + peer, "W1", 1.4)
        for workload in ("W2", "W3", "W4"):
            yield Aim("llama1b", form, _LLAMA + peer, workload, 1.8)
            yield Aim("llama1b", form, "bf16", workload, 0.85)
    yield Aim("llama3b", "fp8", "bf16", "W1", 1.5)
    for workload in ("W2", "W3", "W4", "W5"):
        yield Aim("llama3b", "fp8", "bf16", workload, 0.95)


AIMS = tuple(_aims())


def engine_words(aims: list[Aim], llama_python: str | None) -> dict[str, tuple[str, str]]:
    """By an engine's name: its format, and its --engine as for `compare.py`."""
    words = {}
    for aim in aims:
        for name in (aim.form, aim.other):
            if not name.startswith(_LLAMA):
                words[name] = (name, f"{name}=shardline:file:{sys.executable},--kv-cache-memory,1GiB")
            elif llama_python is not None:
                words[name] = (name.removeprefix(_LLAMA), f"{name}=llama_cpp:file:{llama_python}")
    return words


def stored_bytes(path: Path) -> int:
    """Bytes of the files of a checkpoint."""
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))


def compare_shape(shape: str, aims: list[Aim], options: argparse.Namespace) -> list[str]:
    """Measure the engines that the aims name, and say how they compare."""
    paths: dict[str, Path] = {}
    engines: dict[str, Engine] = {}
    lines = []
    workloads = {name: WORKLOADS[name] for name in dict.fromkeys(aim.workload for aim in aims)}
    rng = random.Random(options.seed)
    try:
        for name, (form, word) in engine_words(aims, options.llama_python).items():
            paths[name] = checkpoint(options.folder, shape, form)
            engines[name] = start(word, paths[name])
            engines[name].ask(prompts_of(rng, WORKLOADS["W1"]), 2)
            taken = engines[name].peak_rss_mb() * 1e6 - _TORCH_BYTES
            share = taken / stored_bytes(paths[name])
            lines.append(f"{shape} {name:16} {taken / 1e9:5.2f} GB beyond torch's, {share:.2f} x its files")
        for workload in workloads.values():
            for engine in engines.values():
                engine.ask(prompts_of(rng, workload), min(workload.output_len, 4))
        check_idle(list(engines.values()))
        measure(list(engines.values()), workloads, options.rounds, rng)
    finally:
        for engine in engines.values():
            engine.close()
    for aim in aims:
        if aim.other in engines:
            found = ratio(engines[aim.form].measured, engines[aim.other].measured, aim.workload)
            verdict = "met" if found.median >= aim.least else "MISSED"
            lines.append(f"{shape} {aim.form:8} {aim.workload} {found!s} x {aim.other}, {verdict}: {aim.least}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/formats"), help="where the checkpoints are written")
    parser.add_argument("--llama-python", help="the interpreter of llama.cpp's environment")
    parser.add_argument("--forms", nargs="+", choices=FORMATS, default=("q4_0", "q4_k_m", "awq", "fp8"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=("W1", "W2", "W3", "W4", "W5"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chosen = [aim for aim in AIMS if aim.form in options.forms and aim.workload in options.workloads]
    lines: list[str] = []
    for shape in dict.fromkeys(aim.shape for aim in chosen):
        lines += compare_shape(shape, [aim for aim in chosen if aim.shape == shape], options)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
