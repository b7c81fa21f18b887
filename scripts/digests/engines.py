"""Engines in this process. What the recorder uses of the engine's inside is used here, and nowhere else."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol


class RunningEngine(Protocol):
    """What the rest of this script asks of an engine."""

    def add(self, request: Any) -> None:
        """Queue a `shardline.types.Request`."""

    def step(self) -> Sequence[Any]:
        """Run one step; the `shardline.types.SequenceOutput` of its requests."""

    def is_busy(self) -> bool: ...
    def close(self) -> None: ...


def start_engine(options: dict[str, Any]) -> RunningEngine:
    """An engine in this process with `EngineConfig` options: one rank, or ranks that are threads.

    Formats that only a GPU has (fp8, w4a16) are accepted when `use_gpu_kernels` was called before.
    """
    from shardline import EngineConfig
    from shardline.engine.engine import Engine
    from shardline.engine.executor import make_executor
    from shardline.engine.resolve import resolve
    from shardline.runtime.setup import prepare

    on_gpu = "TRITON_INTERPRET" in os.environ
    refused = ("fp8", "w4a16", "int8") if on_gpu and "deepseek" in options["model"] else ("fp8", "w4a16")
    gpu_only = {name: value for name, value in options.items() if value in refused}
    asked = EngineConfig.from_options(**{name: value for name, value in options.items() if name not in gpu_only})
    config = resolve(asked)
    if "quantization" in gpu_only:
        scheme = "w4a16_32" if gpu_only["quantization"] == "w4a16" else gpu_only["quantization"]
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization=scheme))
    if "kv_cache_dtype" in gpu_only:
        cache = dataclasses.replace(config.cache, kv_cache_dtype=gpu_only["kv_cache_dtype"])
        config = dataclasses.replace(config, cache=cache)
    setup = prepare(config)
    executor = make_executor(setup)
    executor.start()
    engine = Engine(setup, executor)

    class Adapter:
        add = staticmethod(engine.add)
        step = staticmethod(engine.step)
        close = staticmethod(executor.close)

        @staticmethod
        def is_busy() -> bool:
            return engine.busy

    return Adapter()


def use_gpu_kernels() -> None:
    """From here on, tensors in host memory go through the GPU's kernels, in Triton's interpreter.

    TRITON_INTERPRET=1 must have been set before the process started.
    """
    from types import SimpleNamespace

    import numpy as np
    from tests.ops.triton import conftest as hardware
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from shardline import _cpu
    from shardline.runtime.ops import dispatch
    from shardline.runtime.ops import triton as gpu
    from shardline.runtime.replay import DecodeReplay

    InterpreterBuilder.create_dot = hardware._dot
    InterpreterBuilder.create_fma = hardware._fma
    InterpreterBuilder.create_si_to_fp = hardware._integers_to_float
    interpreter._convert_float = hardware._rounded
    # Ranks may be threads, and the interpreter keeps the place of the running program in a global.
    lock, run_grid = threading.Lock(), GridExecutor.__call__

    def run_locked(self: GridExecutor, *arguments: Any, **keywords: Any) -> None:
        with lock, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            run_grid(self, *arguments, **keywords)

    GridExecutor.__call__ = run_locked
    kernels: Any = SimpleNamespace(**{name: getattr(gpu, name) for name in gpu.__all__})
    kernels.activation_empty = _cpu.activation_empty
    dispatch._BACK_ENDS["cpu"] = lambda: kernels
    DecodeReplay.__call__ = lambda self, *step: self.forward(*step)  # type: ignore[method-assign]
