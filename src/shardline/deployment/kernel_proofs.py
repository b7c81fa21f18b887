"""Which GPU kernels are proved here: verdicts of a process that tries them, kept while card and software are the same.

The trials are in `kernels/cuda/proof/`. They run in a process of their own, since a kernel may hang, or end the process
or its context of the GPU. Such an end is a verdict, too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Protocol

import msgspec

from shardline import __version__, env, lifeline
from shardline.channel import Channel, readable
from shardline.deployment.deployment import Deployment, KernelFallback
from shardline.deployment.kernel_cases import KernelCase
from shardline.deployment.machine import Device
from shardline.segment.pulse import note_work

_HANG_SECONDS = 20.0
"""Seconds after which a case hangs."""
_MOST_PROCESSES = 4
"""That prove kernels of one GPU at the same time; each takes half a gigabyte of its memory."""
_START_SECONDS = 120.0
"""Seconds in which the process must begin its first case: it imports torch, and waits for the GPU."""
_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCES = Path(__file__).parents[1] / "kernels" / "cuda"

_log = logging.getLogger(__name__)


class Verdict(msgspec.Struct, frozen=True):
    """What was found about a case."""

    case: KernelCase
    problem: str = ""
    """Why torch's kernels are used instead; empty: the case is proved."""
    seconds: float = 0.0
    lasts: bool = True
    """Whether another try would find the same; False: for example the GPU's memory was full."""

    @property
    def fallback(self) -> KernelFallback:
        """What a failed case means."""
        return KernelFallback(self.case.kernel, f"{self.problem} ({self.case.shape})")


class ProveCases(msgspec.Struct, frozen=True, tag=True):
    """To the process: try these cases in turn."""

    device: str
    """torch's name of it."""
    capability: str
    """See `Device.capability`."""
    cases: tuple[KernelCase, ...]


class CaseBegun(msgspec.Struct, frozen=True, tag=True):
    """From the process: the next case begins."""


class CaseDone(msgspec.Struct, frozen=True, tag=True):
    """From the process: the case is over."""

    problem: str
    lasts: bool = True


ProofMessage = CaseBegun | CaseDone


class Child(Protocol):
    """The process."""

    def kill(self) -> None: ...
    def wait(self) -> int:
        """The exit code; below 0: the signal that ended it."""


StartChild = Callable[[socket.socket], Child]
"""Starts the process with its end of a connection."""


def start_child(theirs: socket.socket, gpu: str | None = None) -> Child:
    """A process that tries cases. `gpu`: the only one that it sees, see `Device.identifier`; None: as this process."""
    code = "from shardline.kernels.cuda.proof.child import main; main()"
    return lifeline.start_process(code, (theirs.fileno(),), env.for_children(gpu), pass_fds=(theirs.fileno(),))


def prove_cases(
    cases: Sequence[KernelCase],
    device: str,
    capability: str = "",
    *,
    start: StartChild = start_child,
    patience: float = _HANG_SECONDS,
    processes: int | None = None,
) -> list[Verdict]:
    """A verdict for each case. Most of the time kernels are compiled, so several processes share the cases; by default
    a quarter as many as the host has cores, up to 4."""
    count = min(len(cases), processes or max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 4)))
    parts = [cases[first::count] for first in range(count)]
    with ThreadPoolExecutor(max(1, count)) as pool:
        found = pool.map(lambda part: _prove_part(part, device, capability, start, patience), parts)
    verdicts = {_key(verdict.case): verdict for part in found for verdict in part}
    return [verdicts[_key(case)] for case in cases]


def _prove_part(
    cases: Sequence[KernelCase], device: str, capability: str, start: StartChild, patience: float
) -> list[Verdict]:
    """A verdict for each case, in turn. After a crash or a hang, another process goes on with the next case."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(cases):
        left = cases[len(verdicts) :]
        found, end = _prove_some(ProveCases(device, capability, tuple(left)), start, patience)
        verdicts += found
        if not found:
            verdicts += [Verdict(case, end, lasts=False) for case in left]
    return verdicts


def _prove_some(asked: ProveCases, start: StartChild, patience: float) -> tuple[list[Verdict], str]:
    """The verdicts of one process; if there are none, why."""
    cases = asked.cases
    ours, theirs = socket.socketpair()
    channel: Channel[ProofMessage] = Channel(ours, ProofMessage)  # type: ignore[arg-type]
    with ours, theirs:
        child = start(theirs)
        theirs.close()
        verdicts: list[Verdict] = []
        began: float | None = None
        problem = "the process that proves kernels"
        try:
            channel.send(asked)
            while len(verdicts) < len(cases):
                limit = _START_SECONDS if began is None and not verdicts else patience
                if not readable([ours.fileno()], limit):
                    problem += f" did not end within {limit:g} s"
                    break
                message, now = channel.receive(), time.perf_counter()
                if isinstance(message, CaseDone) and began is not None:
                    seconds = round(now - began, 3)
                    verdicts.append(Verdict(cases[len(verdicts)], message.problem, seconds, message.lasts))
                began = now if isinstance(message, CaseBegun) else None
                note_work()  # for whoever watches this process
        except (EOFError, OSError):
            problem += f" ended with {_in_words(child.wait())}"
        finally:
            child.kill()
            child.wait()
    if began is not None:
        verdicts.append(Verdict(cases[len(verdicts)], problem, round(time.perf_counter() - began, 3)))
    return verdicts, problem


def _in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def cards_to_prove(deployment: Deployment) -> list[Device]:
    """A GPU of each kind on which ranks of the first host run Triton's kernels."""
    if deployment.device != "cuda" or deployment.kernels == "torch":
        return []
    host = deployment.machine.hosts[0]
    places = [place for of_engine in deployment.placements for place in of_engine if place.host == 0]
    devices = [host.devices[place.device] for place in places]
    return list({(device.name, device.capability): device for device in reversed(devices)}.values())


def card_identity(device: Device) -> dict[str, str]:
    """What verdicts depend on."""
    digest = hashlib.sha256()
    for file in sorted(_SOURCES.rglob("*.py")):
        digest.update(file.read_bytes())
    try:
        driver = _DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = ""
    versions = {}
    for package in ("torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return {
        "card": device.name,
        "capability": device.capability,
        "driver": driver,
        **versions,
        "shardline": __version__,
        "kernels": digest.hexdigest()[:16],
    }


class _Kept(msgspec.Struct):
    """A file of verdicts."""

    identity: dict[str, str]
    verdicts: list[Verdict]


def verdicts_here(
    cases: Sequence[KernelCase],
    device: Device,
    name: str,
    *,
    again: bool = False,
    prove: Callable[[Sequence[KernelCase], str, str], list[Verdict]] = prove_cases,
) -> list[Verdict]:
    """A verdict for each case: kept ones, and of those that are missing, new ones, which are then kept.

    `name` is torch's name of the device. With `again`, all are new. A cache that cannot be used costs a warning only.
    """
    _check_triton_cache()
    identity = card_identity(device)
    file = env.cache_folder() / "kernels" / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.json"
    known = {_key(verdict.case): verdict for verdict in _read(file)}
    missing = [case for case in cases if again or _key(case) not in known]
    if missing:
        started = time.perf_counter()
        found = prove(missing, name, device.capability)
        failed = sum(bool(verdict.problem) for verdict in found)
        _log.info(
            "%d kernels were compared with torch's on %s, and %d of them failed (%.1f s)",
            len(found), device.name, failed, time.perf_counter() - started,
        )  # fmt: skip
        known |= {_key(verdict.case): verdict for verdict in found}
        _write(file, _Kept(identity, [verdict for verdict in known.values() if verdict.lasts]))
    return [known[_key(case)] for case in cases]


_MOST_OF_A_KERNEL = 1 << 20
"""Bytes of a compiled kernel's largest file."""
_temporary: list[TemporaryDirectory[str]] = []
"""In place of a cache that cannot be used; removed with this process."""


def _check_triton_cache() -> None:
    """Have Triton keep compiled kernels for this process only, if its cache is full or read-only: it would fail."""
    folder = env.triton_cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(_MOST_OF_A_KERNEL))
    except OSError as error:
        _temporary.append(TemporaryDirectory(prefix="shardline-triton-"))
        env.use_triton_cache(_temporary[-1].name)
        _log.warning("Triton cannot keep compiled kernels (%s), so each start compiles them again", error)


def _key(case: KernelCase) -> bytes:
    return msgspec.msgpack.encode(case)


def _read(file: Path) -> list[Verdict]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Kept).verdicts
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        _log.warning("%s cannot be read (%s); kernels are proved again, delete the file if this repeats", file, error)
        return []


def _write(file: Path, kept: _Kept) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
        temporary.replace(file)
    except OSError as error:
        _log.warning("verdicts about kernels cannot be kept (%s), so each start proves them again", error)
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            return
