"""A process that has imported torch, and forks itself into engines and ranks, which need not import it in each test.

It stands in for `lifeline.start_process`, also in the processes that it forks. They are killed when their owner ends.
Whole commands may be forks too, where a test is not about how a process starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from shardline import lifeline
from shardline.process_title import set_process_title

MODULES = [
    "shardline.engine.process",
    "shardline.engine.executor.multiprocess",
    "shardline.engine.executor.uni",
    "shardline.runtime.worker_process",
    "shardline.runtime.worker",
    "shardline.runtime.machines.host.machine",
    "shardline.runtime.parallel.groups",
    "shardline.runtime.parallel.interface",
    "shardline.runtime.parallel.rendezvous",
    "shardline.runtime.parallel.torch_store",
    "shardline.cli.commands.serve",
    "shardline.cluster.cluster",
    "shardline.server.launch",
    "shardline.server.app",
]
_COMMAND = """\
import json, os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
sys.argv[1:] = json.loads(sys.argv[1])
from shardline.cli.main import main
sys.exit(main())
"""
_NAMESPACE = "FORK_NAMESPACE"
"""The variable that names the network namespace of a process and its children."""
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_MAX_BYTES = 1 << 17
_MAX_FDS = 200


class ForkRequest(msgspec.Struct, frozen=True):
    """Run `code`. The descriptors that come with it are the child's status socket, its standard output and standard
    error, and what it inherits."""

    code: str
    arguments: tuple[str, ...]
    folder: str
    """The current one."""
    environment: dict[str, str]
    fds: tuple[int, ...]
    """The numbers that the child's descriptors have in its owner, and in `arguments`."""


Process: TypeAlias = "subprocess.Popen[str] | ForkedProcess"


class ForkedProcess:
    """A process that was forked, with the methods of subprocess.Popen that `engine.children` uses."""

    def __init__(self, pid: int, pidfd: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd, self._status = pidfd, status
        weakref.finalize(self, os.close, pidfd)
        weakref.finalize(self, status.close)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            self.returncode = int.from_bytes(self._status.recv(4, socket.MSG_PEEK), "little", signed=True)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_process(
    requests: socket.socket,
    code: str,
    arguments: Sequence[object],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    output: tuple[int, int] = (1, 2),
) -> ForkedProcess:
    """What `lifeline.start_process` does, by a fork of the server that reads `requests`. `output`: its standard output
    and standard error."""
    request = ForkRequest(code, tuple(map(str, arguments)), os.getcwd(), dict(environment), tuple(pass_fds))
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(requests, [msgspec.msgpack.encode(request)], [theirs.fileno(), *output, *pass_fds])
    answer, fds, _, _ = socket.recv_fds(ours, 4, 1)
    if not fds:
        ours.close()
        raise RuntimeError("the fork server has ended")
    return ForkedProcess(int.from_bytes(answer, "little"), fds[0], ours)


class ForkServer:
    """Starts the server, and ends it; `start_process` takes the place of `lifeline.start_process`."""

    def __init__(self) -> None:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # no thread survives a fork
        fds = [theirs.fileno(), requests.fileno()]
        with theirs:
            self._process = lifeline.start_process(
                f"import sys; sys.path[:0] = {sys.path}; from tests.forks import main; main()",
                fds,
                environment,
                pass_fds=fds,
            )
        self._requests = requests
        self.start_process = functools.partial(start_process, requests)

    def start_command(
        self, *words: str, output: int, namespace: str = "", environment: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        """Start `shardline WORDS…` in a session of its own, and in a network namespace if there is a name. `output` is
        the descriptor of its standard output and standard error."""
        variables = {**os.environ, _NAMESPACE: namespace, **(environment or {})}
        return self.start_process(_COMMAND, [json.dumps(words)], variables, output=(output, output))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()


def _serve(requests: socket.socket, clients: socket.socket) -> ForkRequest:
    """Fork children as they are asked for. Returns in each child, with what it must run."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    children: dict[int, tuple[int, int, socket.socket]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd == requests.fileno():
                data, fds, _, _ = socket.recv_fds(requests, _MAX_BYTES, _MAX_FDS)
                request = msgspec.msgpack.decode(data, type=ForkRequest)
                if (pid := os.fork()) == 0:
                    for _, pidfd, status in children.values():
                        with contextlib.suppress(OSError):
                            os.close(pidfd)
                        status.close()
                    requests.close()
                    os.close(fds[0])
                    for own, given in enumerate(fds[1:3], 1):
                        os.dup2(given, own)
                        os.close(given)
                    return _with_fds(request, fds[3:])
                status = socket.socket(fileno=fds[0])
                for inherited in fds[1:]:
                    os.close(inherited)
                child = (pid, os.pidfd_open(pid), status)
                children |= {child[1]: child, status.fileno(): child}
                poll.register(child[1], select.POLLIN)
                poll.register(status, 0)  # a hang-up is always reported
                with contextlib.suppress(OSError):
                    socket.send_fds(status, [pid.to_bytes(4, "little")], [child[1]])
            elif fd in children:
                pid, pidfd, status = children[fd]
                if fd != pidfd:  # its owner has ended
                    poll.unregister(fd)
                    os.kill(pid, signal.SIGKILL)
                    continue
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    status.send(code.to_bytes(4, "little", signed=True))
                for known in (pidfd, status.fileno()):
                    del children[known]
                    with contextlib.suppress(KeyError):
                        poll.unregister(known)
                os.close(pidfd)
                status.close()


def _with_fds(request: ForkRequest, fds: Sequence[int]) -> ForkRequest:
    """The request with the numbers that its descriptors have here."""
    here = dict(zip(map(str, request.fds), map(str, fds), strict=True))
    return msgspec.structs.replace(request, arguments=tuple(here.get(word, word) for word in request.arguments))


def _enter_namespace(name: str) -> None:
    with open(f"/run/netns/{name}") as namespace:
        if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")


def main() -> None:
    """Entry point; the arguments are both ends of the socket of the requests."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_process_title("fork server")
    requests, clients = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    importlib.import_module("shardline.sandbox.client")  # its processes have limits, so they start afresh
    lifeline.start_process = functools.partial(start_process, clients)  # type: ignore[assignment]
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "imports have started threads"
    gc.collect()
    gc.freeze()
    request = _serve(requests, clients)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if namespace := os.environ.get(_NAMESPACE):
        _enter_namespace(namespace)
    sys.argv = ["-c", *request.arguments]
    exec(request.code, {})
