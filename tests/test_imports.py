"""What must start at once, or on a host without a GPU, imports no torch: not by itself, and not by way of others.

Nor do unit tests by way of the conftest of all."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_whatever_decides_or_serves_imports_no_torch() -> None:
    code = """
import importlib, pkgutil, sys
names = ["shardline.engine.process", "shardline.server.app", "tests.conftest"]
for package in (
    "api", "benchmark", "checkpoints", "cluster", "config", "deployment", "doctor", "engine", "messages", "metrics",
    "models", "planner", "routing", "sandbox", "segment", "server", "structured", "text", "weights",
):
    root = importlib.import_module(f"shardline.{package}")
    names += [module.name for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
for name in names:
    importlib.import_module(name)
assert len(names) > 250, names
heavy = {"torch", "transformers", "triton", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
