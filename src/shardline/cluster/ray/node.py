"""What runs on a host that Ray has chosen: an actor that starts a node process, and the entry point of that process."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from typing import IO

import msgspec

from shardline import env, lifeline
from shardline.messages.node import StartNode

_LENGTH = struct.Struct("<I")
_CODE = "from shardline.cluster.ray.node import main; main()"
_END_SECONDS = 5.0


class NodeStarter:
    """Starts a node process, and knows how it ended. Ray makes an actor of it.

    The process ends with the actor, and it leaves its head if the actor closes its standard input.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._last_line = ""

    def gpus(self) -> list[str]:
        """The GPUs that Ray has reserved for this actor."""
        import ray

        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def start(self, message: bytes, gpus: str | None) -> None:
        """Start the process, or start it again. `message` is an encoded StartNode; it goes through a pipe.

        `gpus`: its CUDA_VISIBLE_DEVICES; None: it uses no GPUs.
        """
        self.stop()
        pipe, environment = subprocess.PIPE, env.for_ray_node(gpus)
        process = lifeline.start_process(_CODE, [], environment, stdin=pipe, stderr=pipe, start_new_session=True)
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(_LENGTH.pack(len(message)) + message)
        process.stdin.flush()
        self._process, self._last_line = process, ""
        threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True).start()

    def find_end(self) -> tuple[int, str] | None:
        """The exit code of the process and the last line of its log; None while it runs. If it is stopped, it ends."""
        if self._process is None:
            return -1, "it was not started"
        if self._process.poll() is None and _is_stopped(self._process.pid):
            self._process.kill()
            return -signal.SIGKILL, "it was stopped"
        code = self._process.poll()
        return None if code is None else (code, self._last_line)

    def stop(self) -> None:
        """End the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _pass_on(self, log: IO[bytes]) -> None:
        """The log of the process goes to Ray's log of this actor, and from there to the front's."""
        with log:
            for line in log:
                text = line.decode(errors="replace").rstrip()
                self._last_line = text or self._last_line
                print(text, file=sys.stderr, flush=True)


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "T"


def main() -> None:
    """Entry point of the node process. Standard input has a StartNode, and stays open as long as the actor lives."""
    (size,) = _LENGTH.unpack(sys.stdin.buffer.read(_LENGTH.size))
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(size), type=StartNode)
    env.adopt_settings(start.settings)
    threading.Thread(target=_await_end, name="actor-watch", daemon=True).start()
    from shardline.cluster.node import run_node

    try:
        code = run_node(start.config, start.token)
    except ValueError as error:
        print(f"shardline: error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _await_end() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
