"""How adapters that come from disk disturb others: `python -m perf.adapter_loads [dense] [--rounds N]`.

Two figures of an engine in this process, on random models:

- **pauses**: sequences decode while requests with adapters of rank 64 that are not in memory arrive. This prints the
  longest time between two of their tokens, beside that with the same requests whose adapters are in memory.
- **1,000 adapters**, asked for by Zipf's law, with room for 32: how long requests wait for their adapter, and how many
  loads a request waits for.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from perf.adapters import start, write_adapter
from perf.random_models import RandomModel, asked_models

from shardline.engine.commands import Answered
from shardline.engine.engine import Engine
from shardline.messages.adapters import LoadAdapter
from shardline.messages.control import Command
from shardline.messages.request import AdapterRef, Request
from shardline.models.spec import DecoderSpec
from shardline.sampling_params import SamplingParams

SLOTS, NUM_ADAPTERS, NUM_REQUESTS, AT_ONCE = 32, 1000, 300, 16
LARGE_RANK, SMALL_RANK = 64, 4
NUM_LOADS, STEPS_BETWEEN = 12, 12


class Loads:
    """The loads that an engine has begun."""

    def __init__(self, engine: Engine) -> None:
        self.digests: list[str] = []
        slots = engine._adapters
        assert slots is not None
        self._give: Callable[[Command, Answered], None] = slots._give_command
        slots._give_command = self.note

    def note(self, command: Command, answered: Answered) -> None:
        if isinstance(command, LoadAdapter):
            self.digests.append(command.adapter.digest)
        self._give(command, answered)


def request(name: str, prompt: list[int], length: int, adapter: AdapterRef | None) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    salt = "" if adapter is None else adapter.digest
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, adapter=adapter, cache_salt=salt)


def gaps(engine: Engine, model: RandomModel, adapters: list[AdapterRef]) -> list[float]:
    """Seconds between the tokens of a decoding sequence, while requests with these adapters arrive one by one."""
    steps = STEPS_BETWEEN * (NUM_LOADS + 1)
    for number, prompt in enumerate(model.prompts(4, 16)):
        engine.add_request(request(f"running-{number}", prompt["prompt_token_ids"], steps, None))
    coming, times = iter(adapters), list[float]()
    while engine.busy:
        told = {output.request_id for output in engine.step()}
        if "running-0" not in told:
            continue
        times.append(time.perf_counter())
        if len(times) % STEPS_BETWEEN == 0 and (ref := next(coming, None)) is not None:
            engine.add_request(request(f"new-{len(times)}", [5, 6, 7], 2, ref))
    return [after - before for before, after in itertools.pairwise(times)]


def measure_pauses(engine: Engine, spec: DecoderSpec, model: RandomModel, home: Path) -> None:
    """Print the longest gaps without and with loads."""
    gaps(engine, model, [])
    for round_ in range(model.rounds):
        refs = [write_adapter(home / f"large-{round_}-{seed}", spec, seed, LARGE_RANK) for seed in range(NUM_LOADS)]
        with_loads, without = gaps(engine, model, refs), gaps(engine, model, refs)
        print(
            f"{model.name}, {NUM_LOADS} loads of rank {LARGE_RANK}: gaps between tokens, median and longest: "
            f"{1e3 * statistics.median(without):.1f} and {1e3 * max(without):.1f} ms with adapters in memory, "
            f"{1e3 * statistics.median(with_loads):.1f} and {1e3 * max(with_loads):.1f} ms while they load",
            flush=True,
        )


def measure_zipf(engine: Engine, spec: DecoderSpec, model: RandomModel, home: Path) -> None:
    """Print what requests wait for whose adapters come by Zipf's law."""
    targets = ("attention.q.", "attention.v.")
    refs = [write_adapter(home / str(seed), spec, seed, SMALL_RANK, targets) for seed in range(NUM_ADAPTERS)]
    loads, dice = Loads(engine), random.Random(0)
    chosen = dice.choices(refs, [1 / (rank + 1) for rank in range(NUM_ADAPTERS)], k=NUM_REQUESTS)
    coming: Iterator[tuple[int, AdapterRef]] = iter(enumerate(chosen))
    began: dict[str, tuple[float, int]] = {}
    waits: list[tuple[float, int]] = []
    """Of each request, its seconds to the first token, and how often its adapter was loaded meanwhile."""
    running = 0
    while True:
        while running < AT_ONCE and (one := next(coming, None)) is not None:
            name = str(one[0])
            began[name] = time.perf_counter(), len(loads.digests)
            engine.add_request(request(name, [5, 6, 7, one[0] % 99], 12, one[1]))
            running += 1
        if not engine.busy:
            break
        for output in engine.step():
            assert not output.error, output.error
            if (entry := began.pop(output.request_id, None)) is not None:
                own = chosen[int(output.request_id)].digest
                waits.append((time.perf_counter() - entry[0], loads.digests[entry[1] :].count(own)))
            running -= output.finish_reason is not None
    steady = sorted(seconds for seconds, _ in waits[AT_ONCE:])
    most, last = max(count for _, count in waits), steady[len(steady) * 99 // 100]
    print(
        f"{model.name}, {NUM_ADAPTERS} adapters, {SLOTS} in memory, {AT_ONCE} requests at once: {len(loads.digests)} "
        f"loads for {NUM_REQUESTS} requests, at most {most} of a request's own; time to the first token: median "
        f"{1e3 * statistics.median(steady):.0f} ms, 99%: {1e3 * last:.0f} ms, longest {1e3 * steady[-1]:.0f} ms",
        flush=True,
    )


def main() -> None:
    """Measure every model that the user asked for."""
    for model in asked_models(__doc__, rounds=2):
        engine, spec = start(model, enable_lora=True, max_loras=SLOTS, max_lora_rank=LARGE_RANK)
        with tempfile.TemporaryDirectory() as home:
            measure_pauses(engine, spec, model, Path(home))
            measure_zipf(engine, spec, model, Path(home))


if __name__ == "__main__":
    main()
