"""Plain torch operations beside transformers: `python perf/torch_backend.py [--rounds 3] [--dtypes bfloat16 float32]`.

8 greedy sequences of a Llama-like model with random weights (SmolLM2-135M's shape), in turns: `--kernels torch` with
exact and with fast numerics, the CPU's own kernels, and transformers' `generate`. Each is a process of its own and gets
all cores. Prompts have 32 to 64 tokens; transformers pads them on the left.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

_NUM_SEQS, _NEW_TOKENS = 8, 96
_CONFIG = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "torch, exact": {"kernels": "torch"},
    "torch, fast": {"kernels": "torch", "numerics": "fast"},
    "own kernels": {},
}
_TRANSFORMERS = "transformers"


def prompts() -> list[list[int]]:
    """Random prompts of unlike lengths."""
    dice = random.Random(0)
    return [[dice.randrange(10, 49000) for _ in range(dice.randint(32, 64))] for _ in range(_NUM_SEQS)]


def make_model(folder: Path) -> None:
    """Save a checkpoint with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**_CONFIG)).to(torch.bfloat16).save_pretrained(folder)


def run_transformers(folder: str, dtype: str) -> float:
    """Tokens per second of `generate`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    longest = max(map(len, prompts()))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts()])

    def generate(count: int) -> None:
        model.generate(
            ids, attention_mask=(ids > 0).long(), min_new_tokens=count, max_new_tokens=count, do_sample=False
        )

    generate(8)
    started = time.perf_counter()
    generate(_NEW_TOKENS)
    return _NUM_SEQS * _NEW_TOKENS / (time.perf_counter() - started)


def run_shardline(folder: str, dtype: str, name: str) -> float:
    """Tokens per second of `LLM.generate`."""
    from shardline import LLM, SamplingParams

    options = {"dtype": dtype, "skip_tokenizer_init": True, "enable_prefix_caching": False, **_OPTIONS[name]}
    with LLM(model=folder, **options) as llm:
        texts = [{"prompt_token_ids": prompt} for prompt in prompts()]

        def generate(count: int) -> None:
            llm.generate(texts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))

        generate(8)
        started = time.perf_counter()
        generate(_NEW_TOKENS)
        return _NUM_SEQS * _NEW_TOKENS / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--only", nargs=3, metavar=("NAME", "FOLDER", "DTYPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        name, folder, dtype = arguments.only
        run = run_transformers if name == _TRANSFORMERS else partial(run_shardline, name=name)
        print(json.dumps(run(folder, dtype)))
        return
    names = [*_OPTIONS, _TRANSFORMERS]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for dtype in arguments.dtypes:
            found: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(arguments.rounds):
                for name in names:
                    command = [sys.executable, __file__, "--only", name, folder, dtype]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
            base = statistics.median(found[_TRANSFORMERS])
            for name, speeds in found.items():
                spread = f"[{min(speeds):.0f}-{max(speeds):.0f}]"
                median = statistics.median(speeds)
                print(f"{dtype:9} {name:13} {median:6.0f} tokens/s {spread:12} {median / base:.2f} x transformers")


if __name__ == "__main__":
    main()
