"""The workloads that a benchmark can send: `<name>.py` is the one of `--dataset-name <name>`.

Each has `add_flags(parser)` and `load_samples(args, tokenizer)`, which raises ValueError for a user's mistake.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from functools import cache
from typing import Any, Protocol, cast

from shardline.benchmark.server_tokenizer import PromptTokenizer
from shardline.benchmark.workload import Sample


class Dataset(Protocol):
    """The functions in the module of a dataset."""

    def add_flags(self, parser: Any) -> None:
        """Add the dataset's flags to an ArgumentParser."""

    def load_samples(self, args: argparse.Namespace, tokenizer: PromptTokenizer | None) -> list[Sample]:
        """`args.num_prompts` samples, drawn with `args.seed`."""


@cache
def dataset_names() -> tuple[str, ...]:
    return tuple(sorted(one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")))


def find_dataset(name: str) -> Dataset:
    """The dataset of this name, which must be one of `dataset_names`."""
    return cast(Dataset, importlib.import_module(f"{__name__}.{name}"))
