"""How long a search takes: `python perf/plan_search.py`. Aims: 0.5 s for 8 GPUs, 5 s for 64.

Each search runs in a new process, as `shardline plan` does. The time of the search alone is printed beside that of the
whole command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

_CASES = (
    ("meta-llama/Llama-3.1-70B-Instruct", "8xH100-80GB-SXM5", 0.5),
    ("Qwen/Qwen3-235B-A22B", "8xH200", 0.5),
    ("deepseek-ai/DeepSeek-V3", "8xB200", 0.5),
    ("meta-llama/Llama-3.1-405B", "8x8xH100-80GB-SXM5", 5.0),
    ("deepseek-ai/DeepSeek-V3", "8x8xH100-80GB-SXM5", 5.0),
)
_SEARCH = """
import sys, time
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand
from shardline.planner.search import search
started = time.perf_counter()
found = search(find_model(sys.argv[1]), parse_cluster(sys.argv[2], known_gpus()), Demand(8192), "cost")
print(time.perf_counter() - started, len(found.options))
"""


def main() -> None:
    """Print the times."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for model, gpus, aim in _CASES:
        alone = subprocess.run([sys.executable, "-c", _SEARCH, model, gpus], capture_output=True, text=True, check=True)
        seconds, layouts = alone.stdout.split()
        command = [sys.executable, "-m", "shardline", "plan", model, "--gpus", gpus, "--max-model-len", "8192"]
        started = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        whole = time.perf_counter() - started
        print(f"{model} on {gpus}: {layouts} layouts in {float(seconds):.2f} s, command {whole:.2f} s (aim {aim:g} s)")


if __name__ == "__main__":
    main()
