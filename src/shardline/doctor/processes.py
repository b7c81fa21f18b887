"""Processes that compute for the doctor, because it imports no torch: what kernels answer, and how fast GPUs gather."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time

from shardline import env
from shardline.deployment.machine import DeviceKind

_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]; from {} import main; main()"
_GATHER_MODULE = "shardline.runtime.parallel.gather_speed"


def start_main(module: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `main` of a module with these arguments. The folder in which the doctor runs hides no other module."""
    command = [sys.executable, "-c", _CODE.format(module), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env.for_children())


def await_output(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What the process has printed, and what went wrong (empty: nothing).

    Raises:
        TimeoutError: it takes longer than `timeout` seconds. It is killed.
    """
    with process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TimeoutError(f"no answer within {timeout:.0f} s") from None
    if process.returncode:
        return "", (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
    return output, ""


class KnownAnswers:
    """Computes the answers while the doctor looks at other things."""

    def __init__(self) -> None:
        self._process = start_main("shardline.kernels.host.known_answers")

    def collect(self, timeout: float) -> tuple[dict[str, str], str]:
        """A digest for each kernel path, none if that takes too long; and what went wrong, an empty text: nothing."""
        try:
            output, problem = await_output(self._process, timeout)
        except TimeoutError:
            return {}, ""
        return (json.loads(output), "") if not problem else ({}, f"the kernels: {problem}")


class GpuGather:
    """Measures while the doctor looks at other things."""

    def __init__(self, num_gpus: int, backend: str = "nccl", device: DeviceKind = "cuda") -> None:
        """With less than two GPUs, nothing is measured. `backend`, `device`: others without GPUs, for tests."""
        self._folder = tempfile.TemporaryDirectory(prefix="shardline-doctor-")
        ranks = range(num_gpus if num_gpus > 1 else 0)
        arguments = (backend, device, self._folder.name)
        self._ranks = [start_main(_GATHER_MODULE, *arguments, str(rank), str(num_gpus)) for rank in ranks]

    def collect(self, timeout: float) -> tuple[float, str]:
        """Bytes per second that a GPU receives, 0 if nothing was measured; and what went wrong, empty: nothing."""
        deadline = time.monotonic() + timeout
        results = []
        for process in self._ranks:
            try:
                results.append(await_output(process, max(1.0, deadline - time.monotonic())))
            except TimeoutError as error:  # NCCL hangs if GPUs cannot reach each other
                results.append(("", str(error)))
        self._folder.cleanup()
        problems = [f"GPU {rank}: {problem}" for rank, (_, problem) in enumerate(results) if problem]
        if problems or not results:
            return 0.0, problems[0] if problems else ""
        return float(results[0][0]), ""
