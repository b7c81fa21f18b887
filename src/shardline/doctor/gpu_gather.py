"""How fast the GPUs of this host gather over NCCL, measured by a process for each of them."""

from __future__ import annotations

import tempfile
import time

from shardline.deployment.machine import DeviceKind
from shardline.doctor.processes import await_output, start_main

_MODULE = "shardline.runtime.parallel.gather_speed"


class GpuGather:
    """Measures while the doctor looks at other things."""

    def __init__(self, num_gpus: int, backend: str = "nccl", device: DeviceKind = "cuda") -> None:
        """With less than two GPUs, nothing is measured. `backend`, `device`: others without GPUs, for tests."""
        self._folder = tempfile.TemporaryDirectory(prefix="shardline-doctor-")
        ranks = range(num_gpus if num_gpus > 1 else 0)
        arguments = (backend, device, self._folder.name)
        self._ranks = [start_main(_MODULE, *arguments, str(rank), str(num_gpus)) for rank in ranks]

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
