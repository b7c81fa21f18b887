"""Engines in this process. Only this part of the recorder uses functions of the engine that are not public."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol


class RunningEngine(Protocol):
    """The interface of an engine for the rest of the script."""

    def add(self, request: Any) -> None:
        """Queue a `Request`."""

    def step(self) -> Sequence[Any]:
        """Run one step; returns the `SequenceOutput`s of its requests."""

    def is_busy(self) -> bool: ...
    def close(self) -> None: ...


def start_engine(options: dict[str, Any]) -> RunningEngine:
    """Start an engine in this process with `EngineConfig` options. It has one rank, or its ranks are threads.

    Formats of the GPU (fp8, packed) are accepted if `use_gpu_kernels` was called before.
    """
    import msgspec

    from shardline import EngineConfig
    from shardline.deployment.here import resolve_here
    from shardline.engine.engine import Engine
    from shardline.engine.executor import make_executor
    from shardline.weights.base import FormatChoice

    on_gpu = "TRITON_INTERPRET" in os.environ
    gpu_only = {name: value for name, value in options.items() if value in ("fp8", "packed")}
    asked = EngineConfig.from_options(**{name: value for name, value in options.items() if name not in gpu_only})
    deployment = resolve_here(asked)
    if "quantization" in gpu_only:
        scheme = gpu_only["quantization"]
        held = FormatChoice(scheme, 32 if scheme == "packed" else 0)
        deployment = msgspec.structs.replace(deployment, weight_format=held)
    elif on_gpu and (name := deployment.weight_format.open_format().on_gpus):
        deployment = msgspec.structs.replace(deployment, weight_format=FormatChoice(name))
    if "kv_cache_dtype" in gpu_only:
        dtype = {"fp8": "float8_e4m3fn"}.get(gpu_only["kv_cache_dtype"], gpu_only["kv_cache_dtype"])
        deployment = msgspec.structs.replace(deployment, cache=msgspec.structs.replace(deployment.cache, dtype=dtype))
    executor = make_executor(deployment, 0)
    executor.start()
    engine = Engine(deployment, executor)

    class Adapter:
        add = staticmethod(engine.add_request)
        step = staticmethod(engine.step)
        close = staticmethod(executor.close)

        @staticmethod
        def is_busy() -> bool:
            return engine.busy

    return Adapter()


def use_gpu_kernels() -> None:
    """Make every rank use the GPU's kernels on host memory from now on, in Triton's interpreter.

    TRITON_INTERPRET=1 must have been set before the process started.
    """
    import numpy as np
    from tests.kernels.cuda import conftest as hardware
    from tests.kernels.cuda.helpers import InterpretedBackend
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from shardline.runtime.machines.host import machine as host

    InterpreterBuilder.create_dot = hardware._dot
    InterpreterBuilder.create_fma = hardware._fma
    InterpreterBuilder.create_si_to_fp = hardware._integers_to_float
    interpreter._convert_float = hardware._rounded
    # Ranks may be threads, but the interpreter keeps the index of the running program in a global.
    lock, run_grid = threading.Lock(), GridExecutor.__call__

    def run_locked(self: GridExecutor, *arguments: Any, **keywords: Any) -> None:
        with lock, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            run_grid(self, *arguments, **keywords)

    GridExecutor.__call__ = run_locked

    host.open_backend = lambda rank, threads: InterpretedBackend()
