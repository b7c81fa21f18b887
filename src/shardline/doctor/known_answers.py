"""The answers of this host's kernels, computed in a process of its own, because the doctor imports no torch."""

from __future__ import annotations

import json
import subprocess
import sys

from shardline import env

_CODE = "import sys; sys.path[:] = [p for p in sys.path if p]; from {} import main; main()"
_MODULE = "shardline.runtime.backends.host.known_answers"


class KnownAnswers:
    """Computes the answers while the doctor looks at other things."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _CODE.format(_MODULE)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env.for_children())

    def collect(self, timeout: float) -> tuple[dict[str, str], str]:
        """A digest for each kernel path, and what went wrong; an empty text: nothing."""
        with self._process:
            try:
                output, errors = self._process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                return {}, f"the kernels gave no answer within {timeout:g} s"
        if self._process.returncode:
            return {}, (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
        return json.loads(output), ""
