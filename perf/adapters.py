"""What adapters cost: `python -m perf.adapters`.

Engines with and without `enable_lora` run the same greedy requests in this process, in turns. For each number of
adapters in a batch, this prints the decode speed of an engine with adapters divided by that of the engine without, as
the median of the rounds with the least and the most. 0 adapters: the engine takes them, and no request has one.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from perf.random_models import RandomModel, asked_models
from safetensors.torch import save_file

from shardline.checkpoints.adapters import read_adapter
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.messages.request import AdapterRef, Request
from shardline.models.adapters import is_adaptable
from shardline.models.parameters import parameters
from shardline.models.spec import DecoderSpec
from shardline.sampling_params import SamplingParams

SHAPES = ((1, 0), (1, 1), (8, 1), (8, 8), (32, 0), (32, 1), (32, 8), (32, 32))
"""Sequences in a batch, and adapters among them."""
RANK, PROMPT_LEN, OUTPUT_LEN = 16, 64, 48


def write_adapter(
    folder: Path, spec: DecoderSpec, seed: int, rank: int = RANK, targets: tuple[str, ...] = ("",)
) -> AdapterRef:
    """A random adapter of the linears of a model with Llama's names whose canonical names contain one of `targets`."""
    from shardline.checkpoints.lookup import family

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in parameters(spec):
        if name.endswith(".weight") and is_adaptable(name) and any(target in name for target in targets):
            key = family(spec.model_type).tensor_source(name, spec).key.removesuffix(".weight")
            tensors[f"base_model.model.{key}.lora_A.weight"] = torch.randn(rank, shape[1], generator=generator) * 0.02
            tensors[f"base_model.model.{key}.lora_B.weight"] = torch.randn(shape[0], rank, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return AdapterRef(read_adapter(folder, spec, rank).digest(), str(folder))


def start(model: RandomModel, **options: object) -> tuple[Engine, DecoderSpec]:
    """An engine in this process, with all cores."""
    setup = resolve_here(EngineConfig.from_options(**model.options, **options))
    executor = make_executor(setup)
    executor.start()
    engine = Engine(setup, executor)
    gc.collect()
    gc.freeze()  # as servers do: to scan the model's objects would take 0.1 s
    return engine, setup.spec


def run(engine: Engine, prompts: Sequence[list[int]], adapters: Sequence[AdapterRef | None]) -> float:
    """Tokens a second after each prompt's first token."""
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        request = Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling, adapter=adapter)
        engine.add_request(request)
    begun: set[str] = set()
    started, count = time.perf_counter(), 0
    while engine.busy:
        outputs = engine.step()
        assert not any(output.error for output in outputs)
        if len(begun) < len(prompts):
            begun |= {output.request_id for output in outputs}
            started, count = time.perf_counter(), 0
        else:
            count += sum(len(output.token_ids) for output in outputs)
    return count / (time.perf_counter() - started)


def measure(model: RandomModel) -> None:
    """Print a line for each shape."""
    plain, spec = start(model)
    adapted, _ = start(model, enable_lora=True, max_loras=32, max_lora_rank=RANK)
    with tempfile.TemporaryDirectory() as home:
        refs = [write_adapter(Path(home) / str(seed), spec, seed) for seed in range(32)]
        for batch, count in SHAPES:
            chosen = [refs[index % count] if count else None for index in range(batch)]
            speeds, ratios = [], []
            for round_ in range(model.rounds + 1):
                prompts = [prompt["prompt_token_ids"] for prompt in model.prompts(batch, PROMPT_LEN)]
                without, with_adapters = run(plain, prompts, [None] * batch), run(adapted, prompts, chosen)
                if round_:  # the first one warms up
                    speeds.append(without)
                    ratios.append(with_adapters / without)
            print(
                f"{model.name}, {batch} sequences, {count} adapters of rank {RANK}: {statistics.median(ratios):.2f} "
                f"[{min(ratios):.2f}-{max(ratios):.2f}] x of {statistics.median(speeds):.0f} tokens/s",
                flush=True,
            )


def main() -> None:
    """Measure every model that the user asked for."""
    for model in asked_models(__doc__, rounds=5):
        measure(model)


if __name__ == "__main__":
    main()
