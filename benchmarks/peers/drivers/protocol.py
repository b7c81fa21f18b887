"""How the harness talks to a driver: one JSON line each way, so that each engine lives in an environment of its own.

A driver is started with the checkpoint's folder, prints {"ready": seconds since its start}, then answers each line
{"prompts": [[token ids]], "output_len": n} with {"seconds": all of it}
and ends at end of file. Everything else it prints goes to stderr. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

STARTED = time.perf_counter()

Generate = Callable[[list[list[int]], int], None]
"""Runs prompts of token ids to exactly this many output tokens each, greedily."""


def serve(load: Callable[[str], Generate]) -> None:
    """Run a driver: `load` takes the folder and returns the function to measure."""
    # Engines print to stdout as they please: keep the real one for answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = load(sys.argv[1])
    generate([[5, 6, 7]], 2)
    print(json.dumps({"ready": time.perf_counter() - STARTED}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        generate(request["prompts"], request["output_len"])
        print(json.dumps({"seconds": time.perf_counter() - began}), file=answers)
