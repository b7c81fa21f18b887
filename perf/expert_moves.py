"""What moving experts gains: `python -m perf.expert_moves`.

Three engines of two ranks with whole experts compute the same prompts, in turns: experts stay, experts move, and
experts move and have copies. The checkpoint's routers prefer some experts (Zipf's law), which lie side by side. For
each engine, this prints the load of the busier rank over the mean, and its speed divided by that of the first engine,
as the median of the rounds with the least and the most. Prompts are long: a small batch that decodes waits for the
weights of all experts, however few tokens each has.

Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import make_checkpoint

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams

EXPERTS = 32
CALM_STEPS, MOST_STEPS = 32, 400
"""Steps without a move after which an engine is measured, and the steps that this may take. A window has 8."""
ENGINES = {
    "experts stay": None,
    "experts move": '{"step_interval": 8}',
    "experts move, 8 copies": '{"step_interval": 8, "num_redundant_experts": 8}',
}


def make_skewed(folder: Path, preference: float) -> Path:
    """A random mixture of experts whose routers add -preference * log(n) to the score of the n-th expert."""
    model = make_checkpoint(
        "glm4_moe",
        folder,
        dtype="bfloat16",
        vocab_size=1024,
        hidden_size=512,
        num_hidden_layers=5,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        moe_intermediate_size=1024,
        n_group=1,
        topk_group=1,
        max_position_embeddings=4096,
    )
    weights = load_file(model / "model.safetensors")
    for key in weights:
        if key.endswith("e_score_correction_bias"):
            weights[key] = (-preference * torch.log(torch.arange(1.0, EXPERTS + 1))).to(weights[key].dtype)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def start(model: Path, balancing: str | None) -> Engine:
    """An engine of two processes with one thread each."""
    options: dict[str, object] = {} if balancing is None else {"enable_eplb": True, "eplb_config": balancing}
    setup = resolve_here(
        EngineConfig.from_options(
            model=str(model),
            tensor_parallel_size=2,
            cpu_threads=1,
            enable_expert_parallel=True,
            enable_prefix_caching=False,
            kv_cache_memory="256MiB",
            **options,
        )
    )
    executor = make_executor(setup)
    executor.start()
    return Engine(setup, executor)


def run(engine: Engine, batch: int, prompt_len: int, seed: int) -> float:
    """Prompt tokens a second."""
    draw = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for index in range(batch):
        prompt = [draw.randrange(1024) for _ in range(prompt_len)]
        engine.add_request(Request(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
    started = time.perf_counter()
    while engine.busy:
        assert not [output.error for output in engine.step() if output.error]
    return batch * prompt_len / (time.perf_counter() - started)


def warm_up(engine: Engine, batch: int, prompt_len: int) -> int:
    """Run until experts stay where they are; returns the steps that it took."""
    last, moved, steps = 0, 0, 0
    while steps - moved < CALM_STEPS and steps < MOST_STEPS:
        run(engine, batch, prompt_len, -1 - steps)
        stats = engine.stats()
        assert stats.experts is not None
        steps = stats.num_steps
        count = 0 if stats.experts.moves is None else stats.experts.moves.count
        if count > last:
            last, moved = count, steps
    return steps


def main() -> None:
    """Measure the three engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="prompts in a round")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--preference", type=float, default=0.12, help="how much routers prefer the first experts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        model = make_skewed(Path(home) / "model", arguments.preference)
        engines = {name: start(model, balancing) for name, balancing in ENGINES.items()}
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for name, engine in engines.items():
            steps = warm_up(engine, arguments.batch, arguments.prompt_len)
            print(f"{name}: warm after {steps} steps", flush=True)
        for round_ in range(arguments.rounds):
            for name, engine in engines.items():
                speeds[name].append(run(engine, arguments.batch, arguments.prompt_len, round_))
        base = speeds["experts stay"]
        for name, engine in engines.items():
            load = engine.stats().experts
            assert load is not None
            ratios = [speed / other for speed, other in zip(speeds[name], base, strict=True)]
            imbalance = load.rank_imbalance if load.moves is None else load.moves.imbalance
            count = "" if load.moves is None else f" after {load.moves.count} moves"
            print(
                f"{name}: busier rank {imbalance:.2f} x the mean{count}; {statistics.median(ratios):.2f} "
                f"[{min(ratios):.2f}-{max(ratios):.2f}] x of {statistics.median(base):.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
