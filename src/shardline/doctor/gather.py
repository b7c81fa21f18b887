"""Look at this node: everything that the checks of a node need, within a few seconds and without the network.

The doctor imports no torch: processes of their own compute known answers, and measure how fast GPUs gather.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

import shardline
from shardline import env
from shardline.checkpoints.folder_files import weight_files
from shardline.checkpoints.gguf.names import all_parts, is_gguf
from shardline.checkpoints.hub import cache_folder, find_local_model
from shardline.cluster.describe import own_address, shared_flags
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.deployment.here import probe_here
from shardline.deployment.interconnect import probe_gpu_links, rdma_ports
from shardline.deployment.machine import DeviceKind
from shardline.deployment.probe import available_isas, software_versions
from shardline.doctor.facts import UNLIMITED, ModelFacts, NodeFacts, Port

_CAP_IPC_LOCK = 14
_ANSWER_SECONDS = 20.0
_HTTP_SECONDS = 1.0


def gather(config: EngineConfig, server: ServerConfig) -> NodeFacts:
    """The facts of this node. What cannot be found out becomes an error in them."""
    cluster, parallel = config.cluster, config.parallel
    answers = KnownAnswers()
    gpus = probe_gpu_links(parallel.device)
    (host,) = probe_here(config, has_driver=bool(gpus.driver)).hosts
    speed = GpuGather(len(host.of_kind("cuda")))
    address, address_error = "", ""
    if cluster.has_nodes:
        try:
            address = own_address(cluster)
        except ValueError as error:
            address_error = str(error)
    num_replicas = cluster.num_local_replicas(parallel.data_parallel_size)
    has_no_ranks = cluster.data_parallel_address is not None and not num_replicas
    known_answers, known_answers_error = answers.collect(_ANSWER_SECONDS)
    nccl_speed, nccl_error = speed.collect(_ANSWER_SECONDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        node=-1 if has_no_ranks else cluster.node_rank or cluster.data_parallel_start_rank,
        num_nodes=0 if cluster.data_parallel_address is not None else cluster.nnodes,
        host=msgspec.structs.replace(host, address=address, num_replicas=num_replicas),
        address_error=address_error,
        software=software_versions(),
        build=_build_digest(),
        flags=shared_flags(config),
        isas=available_isas(),
        known_answers=known_answers,
        known_answers_error=known_answers_error,
        gpus=gpus,
        shm_bytes=_shm_bytes(),
        memlock=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        has_ipc_lock=_has_ipc_lock(),
        open_files=_limit(soft),
        open_files_hard=_limit(hard),
        max_connections=config.scheduler.max_num_seqs + config.scheduler.max_num_waiting,
        name_addresses=_addresses_of(socket.gethostname()),
        ports=_ports(config, server, address),
        model=model_facts(config),
        rdma=rdma_ports(),
        nccl=env.nccl_settings(),
        nccl_speed=nccl_speed,
        nccl_error=nccl_error,
    )


def model_facts(config: EngineConfig) -> ModelFacts:
    """Whether the model is on this node, complete, and otherwise whether there is room for it."""
    model, cache = config.model, cache_folder()
    facts = ModelFacts(model.model, cache=str(cache), cache_free=_free_bytes(cache))
    try:
        folder = find_local_model(model.model, model.revision, model.hub_access)
        if folder is None:
            return facts
        in_gguf = is_gguf(folder)
        parts = all_parts(folder) if in_gguf else weight_files(folder) if model.load_format != "dummy" else ()
        files = list(parts)
        digest = hashlib.sha256(b"" if in_gguf else (folder / "config.json").read_bytes())
        for file in sorted(files):
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
        return msgspec.structs.replace(facts, folder=str(folder), digest=digest.hexdigest()[:12])
    except (ValueError, OSError) as error:
        return msgspec.structs.replace(facts, error=str(error))


def _ports(config: EngineConfig, server: ServerConfig, address: str) -> tuple[Port, ...]:
    """The ports on which this node would listen for clients and nodes, each tried once."""
    cluster = config.cluster
    if cluster.is_headless:
        return ()
    ports = [Port("--port", server.host, server.port)] if server.port else []
    if cluster.has_nodes and address:
        by_replicas = cluster.data_parallel_address is not None
        flag = "--data-parallel-rpc-port" if by_replicas else "--master-port"
        ports.append(Port(flag, address, cluster.head_port))
    return tuple(_try(port) for port in ports)


def _try(port: Port) -> Port:
    error = _try_port(port.address, port.number)
    served = _server_state(port.address, port.number) if error and port.flag == "--port" else ""
    return msgspec.structs.replace(port, error=error, served=served)


def _server_state(address: str, number: int) -> str:
    """What a Shardline server at this port says of itself; empty: there is none."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    connection = http.client.HTTPConnection(here, number, timeout=_HTTP_SECONDS)
    try:
        connection.request("GET", "/ready")
        return str(msgspec.json.decode(connection.getresponse().read(1 << 16), type=dict[str, str])["status"])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, KeyError):
        return ""
    finally:
        connection.close()


def _try_port(address: str, number: int) -> str:
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _build_digest() -> str:
    digest, package = hashlib.sha256(), Path(shardline.__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} ".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _has_ipc_lock() -> bool:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _shm_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def _free_bytes(folder: Path) -> int:
    """Free bytes on the disk on which `folder` lies or will lie."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _addresses_of(name: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)}))
    except OSError:
        return ()


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
