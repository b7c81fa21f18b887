"""The answers of this host's kernels, computed in a process of its own."""

from __future__ import annotations

import json

from shardline.doctor.processes import await_output, start_main

_MODULE = "shardline.kernels.host.known_answers"


class KnownAnswers:
    """Computes the answers while the doctor looks at other things."""

    def __init__(self) -> None:
        self._process = start_main(_MODULE)

    def collect(self, timeout: float) -> tuple[dict[str, str], str]:
        """A digest for each kernel path, none if that takes too long; and what went wrong, an empty text: nothing."""
        try:
            output, problem = await_output(self._process, timeout)
        except TimeoutError:
            return {}, ""
        return (json.loads(output), "") if not problem else ({}, f"the kernels: {problem}")
