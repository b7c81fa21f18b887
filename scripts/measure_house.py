"""Prints how well the source tree separates what should be separate. It runs on any state of the tree.

    python scripts/measure_house.py            # all figures; --places and --files print the lists behind them
    python scripts/measure_house.py --json     # the same for programs
    python scripts/measure_house.py --no-chat  # leave out what needs a running server
    python scripts/measure_house.py --summary  # sizes and the way of a chat, and their change since the last tag

The figures, each defined in the docstring of its module in scripts/house/:

- size: files of src/, their lines, and files that are too short or too long (size.py);
- cycles: modules in import cycles at run time, with imports in functions, without those under TYPE_CHECKING; "typed"
  counts those too;
- machine: places outside the back ends that ask on which machine they run (machine.py), and lines there that use a
  machine's own library;
- trip: files with a function that runs during one streamed chat, and the lines of these files. The server has the demo
  model and two ranks (front, engine, two workers). The spine is the files with four or more such functions
  (request.py);
- formats, models: files that know a weight format by name, without kernels, and files that know a model by name. The
  format's or model's own file is included (mentions.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.house.imports import cycles, import_graph
from scripts.house.machine import Place, library_uses, machine_places
from scripts.house.mentions import format_mentions, model_mentions
from scripts.house.reach import capabilities, mentioning_files
from scripts.house.request import num_lines, spine_files, touched_files, trace_chat
from scripts.house.size import long_files, short_files, tree_size, wide_classes

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = "tests/house.toml"
LONG_FILE, WIDE_CLASS, SHORT_FILE = 600, 25, 30
"""Lines of a file, and methods of a class, from which on a look is worth it."""


def measure(with_chat: bool = True) -> dict[str, Any]:
    """All figures and the lists behind them."""
    found = cycles(import_graph())
    formats = {name: 1 + len(files) for name, files in format_mentions().items()}
    models = {name: 1 + len(files) for name, files in model_mentions().items()}
    files, lines = tree_size()
    figures: dict[str, Any] = {
        "size": {"files": files, "lines": lines, "short": short_files(SHORT_FILE)},
        "cycles": {
            "modules": sum(map(len, found)),
            "typed": sum(map(len, cycles(import_graph(with_types=True)))),
            "list": found,
        },
        "reach": {capability.name: mentioning_files(capability) for capability in capabilities()},
        "machine": _places(machine_places()),
        "libraries": _places(library_uses()),
        "formats": {**_spread(formats), "list": format_mentions()},
        "models": {**_spread(models), "list": model_mentions()},
    }
    if with_chat:
        figures |= measure_chat()
    return figures


def _places(places: list[Place]) -> dict[str, Any]:
    files = {place.file for place in places}
    return {"places": len(places), "files": len(files), "list": [str(place) for place in places]}


def _spread(counts: dict[str, int]) -> dict[str, Any]:
    values = list(counts.values())
    return {"counts": counts, "median": statistics.median(values), "mean": round(statistics.mean(values), 2)}


def measure_chat() -> dict[str, dict[str, Any]]:
    """Files of a streamed chat ("trip"), and those of its spine."""
    traces = trace_chat("demo", "--tensor-parallel-size", "2", "--device", "cpu")
    ways = {"trip": touched_files(traces), "spine": spine_files(traces)}
    return {
        name: {"files": len(files), "lines": sum(map(num_lines, files)), "list": files} for name, files in ways.items()
    }


def summary() -> list[str]:
    """A line for each figure, with its change since the last tag, and warnings."""
    files, lines = tree_size()
    figures: dict[str, dict[str, Any]] = {"src": {"files": files, "lines": lines}, **measure_chat()}
    tag = _git("describe", "--tags", "--abbrev=0")
    before = parse_bounds(_git("show", f"{tag}:{BOUNDS}")) if tag else {}
    printed = []
    for name, figure in figures.items():
        changes = [
            f"{figure[unit] - before[f'{name}_{unit}']:+}" for unit in ("files", "lines") if f"{name}_{unit}" in before
        ]
        change = f" ({', '.join(changes)} since {tag})" if changes else ""
        printed.append(f"{name}: {figure['files']} files, {figure['lines']} lines{change}")
    warnings = {**long_files(LONG_FILE), **wide_classes(WIDE_CLASS)}
    return printed + [f"warning: {name} has grown to {count}" for name, count in warnings.items()]


def parse_bounds(text: str) -> dict[str, int]:
    """The figures in tests/house.toml: `name = figure`, a line each."""
    pairs = (line.partition("#")[0].partition("=") for line in text.splitlines())
    return {name.strip(): int(value) for name, _, value in pairs if value}


def _git(*arguments: str) -> str:
    """What git prints; nothing if it fails, as it does without a repository or a tag."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def _lines(figures: dict[str, Any], with_places: bool, with_files: bool) -> list[str]:
    machine, libraries = figures["machine"], figures["libraries"]
    formats, models = figures["formats"], figures["models"]
    counts = ", ".join(f"{name} {count}" for name, count in formats["counts"].items())
    size, reach = figures["size"], figures["reach"]
    lines = [
        f"src: {size['files']} files, {size['lines']} lines; {len(size['short'])} files are below {SHORT_FILE} lines"
    ]
    lines += [f"modules in import cycles: {figures['cycles']['modules']}, with types {figures['cycles']['typed']}"]
    lines += [f"  {', '.join(component)}" for component in figures["cycles"]["list"] if with_files]
    lines += [f"places where the machine shows: {machine['places']} in {machine['files']} files"]
    lines += [f"  {place}" for place in machine["list"] if with_places]
    lines += [f"lines that use a machine's own library: {libraries['places']} in {libraries['files']} files"]
    lines += [f"  {place}" for place in libraries["list"] if with_places]
    for name, what in (("trip", "files of a streamed chat"), ("spine", "files of its spine")):
        if name in figures:
            lines += [f"{what}: {figures[name]['files']}, {figures[name]['lines']} lines"]
            lines += [f"  {file} {num_lines(file)}" for file in figures[name]["list"] if with_files]
    lines += [f"files that mention {name}, besides its own: {len(files)}" for name, files in reach.items()]
    lines += [f"files that know a weight format: median {formats['median']:g}, mean {formats['mean']:g} ({counts})"]
    lines += [f"  {name}: {', '.join(files)}" for name, files in formats["list"].items() if with_files]
    lines += [f"files that know a model: median {models['median']:g}, mean {models['mean']:g}"]
    lines += [f"  {name}: {', '.join(files)}" for name, files in models["list"].items() if with_files and files]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON, with all lists")
    parser.add_argument("--places", action="store_true", help="list the places that depend on the machine")
    parser.add_argument("--files", action="store_true", help="list the modules and files that were counted")
    parser.add_argument("--no-chat", action="store_true", help="start no server")
    parser.add_argument("--summary", action="store_true", help="sizes and the way of a chat, with their change")
    arguments = parser.parse_args()
    if arguments.summary:
        print("\n".join(summary()))
        return
    figures = measure(not arguments.no_chat)
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        print("\n".join(_lines(figures, arguments.places, arguments.files)))


if __name__ == "__main__":
    main()
