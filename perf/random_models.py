"""The models with random weights on which benchmarks of the planner run: a dense one, and one with experts."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardline.planner.catalog import shipped_facts

_MODELS = {
    "dense": ("Qwen/Qwen3-0.6B", {"num_hidden_layers": 8, "vocab_size": 32000}),
    "experts": (
        "Qwen/Qwen3-30B-A3B",
        {
            "num_hidden_layers": 6,
            "vocab_size": 32000,
            "hidden_size": 1024,
            "num_experts": 16,
            "num_attention_heads": 16,
        },
    ),
}
_MOST_IDS = 30000


@dataclass(frozen=True)
class RandomModel:
    """A model to measure."""

    name: str
    options: dict[str, Any]
    """Options of an engine for it, without parallel sizes."""
    rounds: int
    """Rounds that the user asked for."""
    dice: random.Random

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        """`count` random prompts of `length` tokens."""
        return [{"prompt_token_ids": [self.dice.randrange(10, _MOST_IDS) for _ in range(length)]} for _ in range(count)]


def asked_models(description: str | None, rounds: int) -> Iterator[RandomModel]:
    """The models that the command line asks for, each in a folder that exists until the next one is asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*_MODELS, []], help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds (default: {rounds})")
    arguments = parser.parse_args()
    dice = random.Random(0)
    for name in arguments.models or _MODELS:
        source, changes = _MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            config = dict(shipped_facts()["models"][source]["config"], **changes)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            options = {
                "model": folder,
                "device": "cpu",
                "load_format": "dummy",
                "max_model_len": 1024,
                "kv_cache_memory": "1GiB",
                "enable_prefix_caching": False,
            }
            yield RandomModel(name, options, arguments.rounds, dice)
