"""Compares a layout with its alternative, in turns: `python perf/layouts.py FOLDER [CASE ...]`.

FOLDER keeps the random checkpoints. The environment needs transformers. Without a CASE, all run:

experts    whole experts on 2 ranks / every expert split over 2 ranks
lockstep   2 replicas that share experts in lockstep / 2 replicas with all experts each
latent     a DeepSeek-V2-Lite-like model of about 1 B parameters / the same in transformers
pipeline   a dense model in 2 stages of one thread, a micro-batch in each / the same micro-batches, one at a time
whole      the same pipeline / its stages with all requests in one batch at a time
bubble     no ratio: the share of time in which the stages of this pipeline do not compute, 64 requests at a time
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from shardline import LLM, SamplingParams
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.executor.base import Executor
from shardline.messages.request import Request

Run = Callable[[list[list[int]], int], None]
"""Takes prompts and a number of tokens, and generates this number for each prompt greedily."""

ROUNDS = 5
PROMPT_LEN = 32
VOCAB_SIZE = 32000

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCAB_SIZE}
MOE = transformers.Qwen3MoeConfig(  # type: ignore[call-arg]
    hidden_size=1024,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    norm_topk_prob=True,
    max_position_embeddings=2048,
    **_TOKENS,
)
DENSE = transformers.LlamaConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    **_TOKENS,
)
LATENT = transformers.DeepseekV2Config(
    hidden_size=1024,
    intermediate_size=4096,
    moe_intermediate_size=704,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=16,
    n_routed_experts=32,
    n_shared_experts=2,
    num_experts_per_tok=6,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=512,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    head_dim=64,
    max_position_embeddings=2048,
    **_TOKENS,
)


def checkpoint(folder: Path, config: transformers.PreTrainedConfig) -> str:
    """The folder of a random checkpoint in bfloat16. The checkpoint is made if it does not exist."""
    path = folder / config.model_type
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        print(f"{path}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")
        model.save_pretrained(path)
    return str(path)


@contextlib.contextmanager
def offline(model: str, **options: Any) -> Iterator[Run]:
    """Run `LLM` with a layout."""
    with LLM(model, max_model_len=512, enable_prefix_caching=False, **options) as llm:

        def run(prompts: list[list[int]], output_len: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

        yield run


@contextlib.contextmanager
def stages(model: str, micro_batches: int) -> Iterator[tuple[Engine, Executor]]:
    """Two stages of one thread each. Requests are split over `micro_batches`."""
    options = {"pipeline_parallel_size": 2, "cpu_threads": 1, "max_model_len": 512, "enable_prefix_caching": False}
    setup = resolve_here(EngineConfig.from_options(model=model, **options))
    executor = make_executor(setup)
    executor.start()
    executor.max_in_flight = micro_batches
    yield Engine(setup, executor), executor
    executor.close()


def bubble(model: str, rng: random.Random) -> None:
    """Print the bubble of 64 requests at a time, whose lengths differ, and how many tokens come a second."""
    shares, speeds = [], []
    with stages(model, micro_batches=2) as (engine, executor):
        for round_ in range(ROUNDS + 1):
            requests = (
                Request(
                    request_id=f"{round_}/{number}",
                    prompt_token_ids=[rng.randrange(10, VOCAB_SIZE) for _ in range(rng.randint(32, 96))],
                    sampling=SamplingParams(temperature=0.0, max_tokens=rng.randint(24, 72), ignore_eos=True),
                )
                for number in range(192)
            )
            before, started, num_tokens = executor.rank_times(), time.perf_counter(), 0
            for request in itertools.islice(requests, 64):
                engine.add_request(request)
            while engine.busy:
                for output in engine.step():
                    num_tokens += len(output.token_ids)
                    if output.finish_reason and (following := next(requests, None)):
                        engine.add_request(following)
            seconds = time.perf_counter() - started
            busy = (
                after.busy_seconds - rank.busy_seconds
                for rank, after in zip(before, executor.rank_times(), strict=True)
            )
            if round_ > 0:  # the first warms up
                shares.append(1 - statistics.mean(busy) / seconds)
                speeds.append(num_tokens / seconds)
    print(
        f"bubble: {statistics.median(shares):.1%} [{min(shares):.1%}-{max(shares):.1%}], "
        f"{statistics.median(speeds):.1f} tokens/s",
        flush=True,
    )


@contextlib.contextmanager
def pipeline(model: str, *, micro_batches: int, in_flight: int) -> Iterator[Run]:
    """Run two stages. At most `in_flight` micro-batches run at once."""
    with stages(model, micro_batches) as (engine, executor):
        executor.max_in_flight = in_flight

        def run(prompts: list[list[int]], output_len: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            for index, prompt in enumerate(prompts):
                engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
            while engine.busy:
                engine.step()

        yield run


@contextlib.contextmanager
def reference(model: str) -> Iterator[Run]:
    """Run transformers with all prompts in one batch."""
    module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def run(prompts: list[list[int]], output_len: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            module.generate(  # type: ignore[misc]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
            )

    yield run


def compare(
    name: str, first: Run, second: Run, rng: random.Random, *, num_prompts: int = 32, output_len: int = 32
) -> None:
    """Run both in turns; print their tokens/s and the ratio over the rounds."""
    speeds: tuple[list[float], list[float]] = ([], [])
    for round_ in range(ROUNDS + 1):
        prompts = [[rng.randrange(10, VOCAB_SIZE) for _ in range(PROMPT_LEN)] for _ in range(num_prompts)]
        for run, of_run in zip((first, second), speeds, strict=True):
            started = time.perf_counter()
            run(prompts, output_len)
            if round_ > 0:  # the first warms up
                of_run.append(num_prompts * output_len / (time.perf_counter() - started))
    ratios = sorted(a / b for a, b in zip(*speeds, strict=True))
    print(
        f"{name}: {statistics.median(speeds[0]):.1f} against {statistics.median(speeds[1]):.1f} tokens/s, ratio "
        f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
        flush=True,
    )


def main() -> None:
    """Run the cases named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ["experts", "lockstep", "latent", "pipeline", "whole", "bubble"]
    parser.add_argument("folder", type=Path, help="where the random checkpoints are kept")
    parser.add_argument("case", nargs="*", choices=[*cases, []])
    options = parser.parse_args()
    folder, wanted = options.folder, options.case or cases
    rng = random.Random(0)
    whole = {"enable_expert_parallel": True}
    if "experts" in wanted:
        model = checkpoint(folder, MOE)
        with offline(model, tensor_parallel_size=2, **whole) as a, offline(model, tensor_parallel_size=2) as b:
            compare("experts", a, b, rng)
    if "lockstep" in wanted:
        model = checkpoint(folder, MOE)
        with offline(model, data_parallel_size=2, **whole) as a, offline(model, data_parallel_size=2) as b:
            compare("lockstep", a, b, rng)
    if "latent" in wanted:
        model = checkpoint(folder, LATENT)
        with offline(model) as a, reference(model) as b:
            compare("latent", a, b, rng)
    for name, micro_batches in (("pipeline", 2), ("whole", 1)):
        if name in wanted:
            model = checkpoint(folder, DENSE)
            both = pipeline(model, micro_batches=2, in_flight=2)
            one = pipeline(model, micro_batches=micro_batches, in_flight=1)
            with both as a, one as b:
                # Micro-batches should compute rather than wait for memory, and run long after the pipeline has filled.
                compare(name, a, b, rng, num_prompts=64, output_len=96)
    if "bubble" in wanted:
        bubble(checkpoint(folder, DENSE), rng)


if __name__ == "__main__":
    main()
