"""Compares 2 ranks of one thread that share keys with 1 rank of two threads: `python perf/context_parallel.py`.

It prints medians of the ratios of speeds, in turns: prefill of a long prompt, decode behind a long and a short one;
and how much longer the longest request is with the same memory for keys and values on each rank. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardline import LLM, SamplingParams
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here

_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 65536,
    "vocab_size": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {"cpu_threads": 2},
    "2 ranks": {"cpu_threads": 1, "context_parallel_size": 2},
}
_DECODED = 64
_SHORT, _SHORT_PROMPTS = 448, 4


def seconds(llm: LLM, rng: random.Random, length: int) -> tuple[float, float]:
    """How long a prompt that no cache has takes, and the tokens after its first one."""
    prompt = [rng.randrange(8192) for _ in range(length)]
    params = SamplingParams(max_tokens=1 + _DECODED, min_tokens=1 + _DECODED, temperature=0.0, detokenize=False)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    times = output.metrics
    assert times is not None
    return times.first_token_ts - times.scheduled_ts, times.last_token_ts - times.first_token_ts


def measure(llm: LLM, rng: random.Random, long: int) -> Iterator[tuple[str, float]]:
    """Names and seconds of the parts of a round."""
    prefill, decode = seconds(llm, rng, long)
    yield f"prefill of {long}", prefill
    yield f"decode at {long}", decode
    yield "decode at 512", sum(seconds(llm, rng, _SHORT)[1] for _ in range(_SHORT_PROMPTS))


def longest(model: Path, memory: str, **options: Any) -> int:
    """The longest request with this memory for keys and values on each rank."""
    config = EngineConfig.from_options(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_memory=memory,
        max_model_len="auto",
        **options,
    )
    return resolve_here(config).max_model_len


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=16384, help="tokens of the long prompt")
    args = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(_SHAPE))
        lengths = {name: longest(model, "64MiB", **options) for name, options in _LAYOUTS.items()}
        print(f"longest request: {lengths}, {lengths['2 ranks'] / lengths['1 rank']:.2f} x", flush=True)
        engines = {
            name: LLM(str(model), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, **options)
            for name, options in _LAYOUTS.items()
        }
        found: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            one, two = (dict(measure(llm, rng, args.long)) for llm in engines.values())
            for part, of_one in one.items():
                found.setdefault(part, []).append(of_one / two[part])
        for part, ratios in found.items():
            print(f"{part}: {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
        for llm in engines.values():
            llm.close()


if __name__ == "__main__":
    main()
