"""How fast weights that are read from a file decode: `python -m perf.weight_stream`.

Of the dense model, an engine with all cores decodes 32 sequences, once with all weights in memory, and once with all
layers read from a file in every step. The ceiling is what the bytes of the file take if they are read in order, past
the page cache, with nothing to compute; it is measured in the same turns, and so is what `plan --gpus here` predicts.
Of a model with 64 experts, of which each token chooses 8, half of the experts stay in memory. What a step takes is
compared with reading the other half in every step. Printed are medians with the least and the most.

The file lies in the folder in which this runs. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

from perf.adapters import OUTPUT_LEN, run
from perf.random_models import RandomModel, asked_models

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.kernels.memory import map_memory
from shardline.planner.auto import HostLoad, plan_here
from shardline.planner.layout import HOST_AXES

BATCH, PROMPT_LEN, CHUNK = 32, 64, 8 << 20
EXPERTS = 64


def start(**options: object) -> tuple[Engine, int]:
    """An engine in this process, and the bytes that it reads in a step."""
    setup = resolve_here(EngineConfig.from_options(**options))
    executor = make_executor(setup)
    executor.start()
    return Engine(setup, executor), int(setup.file_bytes)


def read_seconds(folder: Path, num_bytes: int) -> float:
    """What reading so many bytes of a file takes."""
    with tempfile.NamedTemporaryFile(dir=folder) as file, map_memory(CHUNK) as chunk:
        count = -(-num_bytes // CHUNK)
        for _ in range(count):
            chunk[:] = os.urandom(1 << 20) * (CHUNK >> 20)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        seconds = math.inf
        for _ in range(3):  # the host of a virtual machine may keep what was read
            started = time.perf_counter()
            for number in range(count):
                os.preadv(descriptor, [chunk], number * CHUNK)
            seconds = min(seconds, time.perf_counter() - started)
        os.close(descriptor)
    return seconds * num_bytes / (count * CHUNK)


def predict(options: dict[str, object], batch: int = BATCH) -> float:
    """The tokens a second of one rank, as the planner has them."""
    sizes = {f"{axis}_parallel_size": 1 for axis in HOST_AXES}
    load = HostLoad(batch, PROMPT_LEN, OUTPUT_LEN)
    best = plan_here(EngineConfig.from_options(**options), given=sizes, load=load).best
    assert best is not None
    assert best.speed is not None
    return batch / best.speed.tpot.p50


def measure(model: RandomModel, folder: Path) -> None:
    """Print a line."""
    kept, _ = start(**model.options)
    options = {**model.options, "cpu_offload_gb": 1000.0, "offload_to": str(folder)}
    read, num_bytes = start(**options)
    floors, shares, slower, predicted = [], [], [], []
    for round_ in range(model.rounds + 1):
        prompts = [prompt["prompt_token_ids"] for prompt in model.prompts(BATCH, PROMPT_LEN)]
        floor, expected = read_seconds(folder, num_bytes), predict(options)
        in_memory, streamed = run(kept, prompts, [None] * BATCH), run(read, prompts, [None] * BATCH)
        if round_:  # the first one warms up
            floors.append(num_bytes / floor / 1e9)
            shares.append(floor * streamed / BATCH)
            slower.append(in_memory / streamed)
            predicted.append(expected / streamed)
    print(
        f"{model.name}: {num_bytes / 1e9:.2f} GB a step at {statistics.median(floors):.2f} "
        f"[{min(floors):.2f}-{max(floors):.2f}] GB/s; {statistics.median(shares):.2f} "
        f"[{min(shares):.2f}-{max(shares):.2f}] x what reading permits; {statistics.median(slower):.1f} x slower than "
        f"in memory; predicted / measured {statistics.median(predicted):.2f} "
        f"[{min(predicted):.2f}-{max(predicted):.2f}]",
        flush=True,
    )


def measure_experts(model: RandomModel, folder: Path) -> None:
    """Print a line for 1, 4 and 32 sequences."""
    file = Path(str(model.options["model"])) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": EXPERTS}))
    kept, _ = start(**model.options)
    options = {**model.options, "cpu_offload_gb": 1000.0, "offload_to": str(folder)}
    weights = resolve_here(EngineConfig.from_options(**options)).weights[0]
    options["cpu_offload_gb"] = (weights.read_bytes + weights.kept_expert_bytes) / 2 / (1 << 30)
    read, num_bytes = start(**options)
    for batch in (1, 4, BATCH):
        speeds, slower, faster, predicted = [], [], [], []
        for round_ in range(model.rounds + 1):
            prompts = [prompt["prompt_token_ids"] for prompt in model.prompts(batch, PROMPT_LEN)]
            floor, expected = read_seconds(folder, num_bytes), predict(options, batch)
            in_memory, streamed = run(kept, prompts, [None] * batch), run(read, prompts, [None] * batch)
            if round_:  # the first one warms up
                speeds.append(streamed)
                slower.append(in_memory / streamed)
                faster.append(floor * streamed / batch)
                predicted.append(expected / streamed)
        print(
            f"{model.name}, {batch} sequences: {statistics.median(speeds):.1f} [{min(speeds):.1f}-{max(speeds):.1f}] "
            f"tokens/s; {statistics.median(slower):.1f} [{min(slower):.1f}-{max(slower):.1f}] x slower than in memory; "
            f"{statistics.median(faster):.1f} [{min(faster):.1f}-{max(faster):.1f}] x as fast as reading "
            f"{num_bytes / 1e9:.2f} GB in every step; predicted / measured {statistics.median(predicted):.2f} "
            f"[{min(predicted):.2f}-{max(predicted):.2f}]",
            flush=True,
        )


def main() -> None:
    """Measure every model that the user asked for."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for model in asked_models(__doc__, rounds=5):
            (measure_experts if model.name == "experts" else measure)(model, Path(folder))


if __name__ == "__main__":
    main()
