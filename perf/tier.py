"""What a second tier of the KV cache gains and costs: `python -m perf.tier`.

Engines run in this process, in turns. The pool holds one prompt of 4,096 tokens, so that each prompt evicts the one
before. Printed are the time to the first token of a prompt that is new, and of one that was evicted: its blocks come
back from host memory, or from files that are not in the page cache any more. Then prompts that never come back, with
the tier and without it: what it costs. All ratios are of neighbours in time; the median, with the least and the most.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from perf.random_models import RandomModel, asked_models

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams

PROMPT_LEN = 4096
BLOCK_SIZE = 32
UNIQUE_LEN, UNIQUE_OUTPUT, UNIQUE_COUNT = 512, 32, 16


def start(model: RandomModel, **options: object) -> Engine:
    """An engine in this process, with all cores, whose pool holds a prompt and little more."""
    blocks = PROMPT_LEN // BLOCK_SIZE + 40
    setup = resolve_here(
        EngineConfig.from_options(
            **model.options | {"max_model_len": PROMPT_LEN + 64, "enable_prefix_caching": True},
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=blocks,
            **options,
        )
    )
    executor = make_executor(setup)
    executor.start()
    return Engine(setup, executor)


def seconds_of(engine: Engine, prompts: list[list[int]], output_len: int = 1) -> float:
    """Seconds for all prompts together."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while engine.busy:
        engine.step()
    return time.perf_counter() - started


def drop_page_cache(folder: Path) -> None:
    """Have the files written to storage, and forgotten by the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def show(name: str, ratios: list[float], unit: str = "x") -> None:
    """A line with the median, the least and the most."""
    print(f"  {name}: {statistics.median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}] {unit}", flush=True)


def new_prompts(model: RandomModel, count: int, length: int) -> list[list[int]]:
    """Random prompts of `length` tokens."""
    return [prompt["prompt_token_ids"] for prompt in model.prompts(count, length)]


def measure_second_use(model: RandomModel, name: str, folder: Path | None, gib: float) -> None:
    """The time to the first token of a prompt that was evicted against that of the new prompts beside it."""
    files = {} if folder is None else {"kv_offloading_dir": str(folder)}
    engine = start(model, kv_offloading_size=gib, **files)
    seconds_of(engine, new_prompts(model, 1, PROMPT_LEN))
    computed: list[float] = []
    ratios: list[float] = []
    for _ in range(model.rounds):
        first, *others = new_prompts(model, 4, PROMPT_LEN)
        before = seconds_of(engine, [first])
        for other in others:
            seconds_of(engine, [other])
        if folder is not None:
            time.sleep(1.0)  # the last files are being written
            drop_page_cache(folder)
        hits = engine.stats().prefix_hits
        again = seconds_of(engine, [first])
        assert engine.stats().prefix_hits - hits > PROMPT_LEN - 2 * BLOCK_SIZE, "it was not fetched"
        after = seconds_of(engine, new_prompts(model, 1, PROMPT_LEN))
        computed.append((before + after) / 2)
        ratios.append(again / computed[-1])
    show("a new prompt", computed, "s")
    show(f"an evicted prompt, from {name}", ratios)
    tier = engine.stats().tier
    assert tier is not None
    copies = tier.copies
    assert folder is None or copies.read_bytes > 0.9 * copies.fetched_bytes, "host memory had it"
    print(
        f"  copied out at {copies.stored_bytes / copies.stored_seconds / 1e9:.1f} GB/s, back at "
        f"{copies.fetched_bytes / copies.fetched_seconds / 1e9:.1f} GB/s; read {copies.read_bytes / 1e6:.0f} MB",
        flush=True,
    )
    engine.close()


def measure_cost(model: RandomModel, folder: Path | None) -> None:
    """Prompts that never come back: how many times as fast they are with the tier as without it."""
    files = {} if folder is None else {"kv_offloading_dir": str(folder)}
    without, with_tier = start(model), start(model, kv_offloading_size=0.5, **files)
    ratios: list[float] = []
    for round_ in range(2 * model.rounds + 1):
        prompts = new_prompts(model, UNIQUE_COUNT, UNIQUE_LEN)
        order = (without, with_tier) if round_ % 2 else (with_tier, without)
        seconds = {engine: seconds_of(engine, prompts, UNIQUE_OUTPUT) for engine in order}
        if round_:  # the first one warms up
            ratios.append(seconds[without] / seconds[with_tier])
    show("prompts that never come back" + ", with files" * (folder is not None), ratios)
    for engine in (without, with_tier):
        engine.close()


def main() -> None:
    """Measure every model that the user asked for."""
    for model in asked_models(__doc__, rounds=3):
        print(model.name, flush=True)
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
            measure_second_use(model, "host memory", None, 1.0)
            measure_second_use(model, "files", Path(folder) / "use", 0.14)
            measure_cost(model, None)
            measure_cost(model, Path(folder) / "cost")


if __name__ == "__main__":
    main()
