"""The protocol between harness and driver: one JSON line each way, so each engine can have its own environment.

A driver is started as `DRIVER FOLDER PRECISION [OPTION...]`: the checkpoint's folder or file, and bf16, int8 or int4
weights, or "file" for those of the checkpoint. When it has answered a first prompt, it prints {"version": ...}. Then it
answers each line {"prompts": [[token ids]], "output_len": n} with {"seconds": total, "tokens": [[output ids]]}. It ends
at end of file. All its other output goes to stderr. This module needs the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Takes prompts of token ids and a number of output tokens, and returns exactly this many greedy tokens for each."""


def serve(load: Callable[[str, str], Generate], package: str) -> None:
    """Run a driver: `load` takes the folder and the precision and returns the function to measure.

    Args:
        load: loads the model.
        package: the distribution whose version is printed.
    """
    # Engines may print to stdout. The real stdout is kept for answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = load(sys.argv[1], sys.argv[2])
    generate([[5, 6, 7]], 2)
    try:
        engine_version = version(package)
    except PackageNotFoundError:
        engine_version = "not installed, run from its source"
    print(json.dumps({"version": engine_version}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = generate(request["prompts"], request["output_len"])
        seconds = time.perf_counter() - began
        assert all(len(ids) == request["output_len"] for ids in tokens), [len(ids) for ids in tokens]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)


def refuse_other_than(precision: str, known: list[str]) -> None:
    """End with a readable message if the engine does not support this precision."""
    if precision not in known:
        raise SystemExit(f"this driver knows the precisions {', '.join(known)}, not {precision!r}")


def converted_folder(folder: str, name: str) -> Path:
    """The path of the checkpoint in a peer's own format. It is beside the checkpoint, so it is written only once."""
    return Path(folder).resolve().with_name(f"{Path(folder).resolve().name}-{name}")
