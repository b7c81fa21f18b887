"""Child processes: how they are started, how they show that they live, and how they ended, in words."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

from shardline import env, lifeline
from shardline.segment.activity import Activity, is_stopped, read_activity
from shardline.segment.pulse import Pulse
from shardline.segment.pulse_watch import SILENCE, START_SILENCE, PulseWatch

_FOREIGN_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that somebody else sends; the kernel does, too, if memory is short or the parent has ended."""


_END = "from shardline.lifeline import end_process; end_process()"


def is_own_end(code: int | None) -> bool:
    """Whether a process that ended with this exit code did so by itself: it exited, or crashed. None: it runs."""
    return code is not None and -code not in _FOREIGN_SIGNALS


class Child:
    """A Python process that runs `module.main()`; its arguments are the numbers of file descriptors.

    The last descriptor is that of its pulse (`segment.pulse.start_pulse`). This is not multiprocessing, so the user's
    script needs no __main__ guard.
    """

    def __init__(self, module: str, fds: Sequence[int], gpus: str | None = None) -> None:
        """Start the process. `gpus` is as in `env.for_children`.

        Raises:
            OSError: it cannot be started.
        """
        self._pulse = Pulse()
        self._watch = PulseWatch(self._signs_of_life)
        passed = [*fds, self._pulse.fd]
        # If a fault ends the process (signal 11, for example), it prints what each of its threads was doing.
        code = f"import faulthandler; faulthandler.enable()\n{self.code(module)}\n{_END}"
        try:
            self._process = lifeline.start_process(code, passed, env.for_children(gpus), pass_fds=passed)
        finally:
            self._pulse.release_fd()
        self._was_silent = False

    def code(self, module: str) -> str:
        """What the process runs."""
        return f"from {module} import main; main()"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def work(self) -> int:
        """Pieces of work that the process has finished; see `Pulse.work`."""
        return self._pulse.work

    def activity(self) -> Activity:
        """What the process and its descendants have done so far."""
        return read_activity(self.pid, self.work)

    def is_silent(self) -> bool:
        """Whether the process lives, but has given no sign of it for SILENCE seconds; look every CHECK_INTERVAL.

        A process that has not begun to give signs has START_SILENCE seconds, unless it is stopped.
        """
        if self._watch.is_silent() and self._process.poll() is None:
            self._was_silent = True
        return self._was_silent

    def _signs_of_life(self) -> int:
        """A number that changes as long as the process gets on; it is negative before the first beat."""
        beats = self._pulse.beats
        if beats > 0:
            return beats
        activity = self.activity()
        return 1 if is_stopped(self.pid) else -1 - activity.num_bytes - int(100 * activity.cpu_seconds)

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def wait(self, timeout: float) -> bool:
        """Whether the process ends within `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill the process, even if it is stopped."""
        self._process.kill()

    def end(self, timeout: float) -> bool:
        """Give the process `timeout` seconds to end, then kill it; False: it hangs in the kernel and is left."""
        if self.wait(timeout):
            return True
        self._process.kill()
        return self.wait(2.0)

    def describe_end(self) -> str:
        """How the process ended, or that it is silent; waits up to a second for its exit code."""
        if self._was_silent:
            if self._signs_of_life() < 0:
                return f"has not begun: it has read and computed nothing for {START_SILENCE:g} s"
            return f"has given no sign of life for {SILENCE:g} s: it is stopped"
        if not self.wait(1.0):
            return "closed its channel but still runs"
        code = self._process.returncode
        assert code is not None
        if code == -9:
            return "was killed by signal 9 (somebody's kill, or the host ran out of memory)"
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
