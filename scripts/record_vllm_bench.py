"""Record the flags, rows and result keys of `vllm bench`, and the names of vLLM's metrics, from its sources.

    python scripts/record_vllm_bench.py SITE_PACKAGES/vllm > tests/benchmark/vllm_bench.json

The sources are parsed and not imported, so that the recording needs no working installation.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {"DEFAULT_NUM_PROMPTS": 1000, "float": float}


def main() -> None:
    """Print the recording as JSON."""
    package = Path(sys.argv[1])
    version = re.search(r"__version__ = version = '([^']+)'", (package / "_version.py").read_text())
    serve = parse(package / "benchmarks" / "serve.py")
    datasets = parse(package / "benchmarks" / "datasets" / "datasets.py")
    request = parse(package / "benchmarks" / "lib" / "endpoint_request_func.py")
    backends = sorted(dict_keys(assigned(request, "ASYNC_REQUEST_FUNCS")))
    base = flags(function(datasets, "add_random_dataset_base_args"))
    multimodal = flags(function(datasets, "add_random_multimodal_dataset_args"))
    found: dict[str, Any] = {
        "version": version.group(1) if version else "",
        "flags": {
            "serve": flags(function(datasets, "add_dataset_parser"))
            | base
            | multimodal
            | flags(function(serve, "add_cli_args")),
            "throughput": flags(function(parse(package / "benchmarks" / "throughput.py"), "add_cli_args"))
            | base
            | multimodal,
            "latency": flags(function(parse(package / "benchmarks" / "latency.py"), "add_cli_args")),
            "startup": flags(function(parse(package / "benchmarks" / "startup.py"), "add_cli_args")),
            "sweep serve": flags(function(parse(package / "benchmarks" / "sweep" / "serve.py"), "add_cli_args")),
        },
        "rows": rows(function(serve, "benchmark")),
        "metric_titles": metric_names(function(serve, "benchmark")),
        "keys": result_keys(serve),
        "metrics": metrics(package),
    }
    found["flags"]["serve"]["--backend"]["choices"] = backends
    print(json.dumps(found, indent=1, sort_keys=True))


def parse(path: Path) -> ast.Module:
    """A source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def function(tree: ast.AST, name: str) -> ast.AST:
    """The function of this name."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next(node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name)


def assigned(tree: ast.AST, name: str) -> ast.AST:
    """The value that a name gets."""
    for node in ast.walk(tree):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == name:
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            assert node.value is not None
            return node.value
    raise SystemExit(f"no {name}")


def dict_keys(tree: ast.AST) -> list[str]:
    """The constant keys of all dict displays."""
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


def flags(tree: ast.AST) -> dict[str, Any]:
    """Flag -> default, choices, and whether it is required, of every add_argument."""
    found = {}
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        words = [word.value for word in node.args if isinstance(word, ast.Constant)]
        options = {option.arg: option.value for option in node.keywords}
        name = next(word for word in words if word.startswith("--"))
        action = evaluate(options.get("action"))
        default = evaluate(options["default"]) if "default" in options else (False if action == "store_true" else None)
        choices = evaluate(options["choices"]) if "choices" in options else None
        found[name] = {
            "default": "inf" if default == float("inf") else default,
            "choices": sorted(choices) if isinstance(choices, (list, set)) else None,
            "required": evaluate(options.get("required")) is True,
        }
    return found


def evaluate(node: ast.AST | None) -> Any:
    """The value of a simple expression; of others, their text."""
    if node is None:
        return None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value for part in node.values if isinstance(part, ast.Constant))
    try:
        return eval(compile(ast.Expression(node), "vllm", "eval"), {"__builtins__": {}}, NAMES)  # type: ignore[arg-type]
    except Exception:
        return ast.unparse(node)


def strings(tree: ast.AST) -> Iterator[str]:
    """All constant strings in the order of the source."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    yield from (str(node.value) for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def rows(tree: ast.AST) -> list[str]:
    """The labels of the table, in order."""
    return [text.strip() for text in strings(tree) if re.fullmatch(r"[A-Z][A-Za-z0-9 ,()/%.-]*:", text.strip())]


def metric_names(tree: ast.AST) -> dict[str, list[str]]:
    """Metric -> its short name and its title."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    found = {}
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "process_one_metric":
            name, *titles = (word.value for word in call.args[:3] if isinstance(word, ast.Constant))
            found[str(name)] = [str(title) for title in titles]
    return found


def result_keys(tree: ast.AST) -> dict[str, list[str]]:
    """The keys of the result: of the run (generation, pooling), and of the file."""
    dicts = []
    for node in ast.walk(function(tree, "benchmark")):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == "result":
                dicts.append(sorted(dict_keys(node.value)))
    subscripts = [node for node in ast.walk(function(tree, "main_async")) if isinstance(node, ast.Subscript)]
    file = {
        str(node.slice.value)
        for node in subscripts
        if isinstance(node.slice, ast.Constant) and ast.unparse(node.value) == "result_json"
    }
    generation, pooling = dicts
    return {"generation": generation, "pooling": pooling, "file": sorted(file)}


def metrics(package: Path) -> list[str]:
    """The Prometheus metrics that the sources name."""
    source = (package / "v1" / "metrics" / "loggers.py").read_text(encoding="utf-8")
    return sorted(set(re.findall(r'name ?= ?"(vllm:[a-z_0-9]+)"', source)))


if __name__ == "__main__":
    main()
