"""What must start at once, or on a host without a GPU, imports no torch: not by itself, and not by way of others."""

from __future__ import annotations

import subprocess
import sys


def test_whatever_decides_or_serves_imports_no_torch() -> None:
    code = """
import importlib, pkgutil, sys
names = ["shardline.engine.process", "shardline.server.app"]
for package in (
    "api", "benchmark", "checkpoints", "cluster", "config", "deployment", "doctor", "engine", "messages", "metrics",
    "models", "planner", "routing", "sandbox", "segment", "server", "structured", "text", "weights",
):
    root = importlib.import_module(f"shardline.{package}")
    names += [module.name for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 250, names
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
