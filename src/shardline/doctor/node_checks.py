"""What may be wrong with one node. Each check is a function of its facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from shardline.config.units import format_bytes
from shardline.doctor.facts import UNLIMITED, Finding, NodeFacts, Verdict

_LEAST_SHM = 1 << 30
_SPARE_FILES = 256
_LITTLE_DISK = 20 << 30
_SLOW_LINKS = {"SYS", "NODE"}
_SLOW_NCCL = 5e9
"""Bytes per second that even GPUs without peer access reach through host memory over PCIe 3."""

Check = Callable[[NodeFacts], Iterator[Finding]]


def check_node(facts: NodeFacts) -> list[Finding]:
    """All findings about one node."""
    return [finding for check in CHECKS for finding in check(facts)]


def check_versions(facts: NodeFacts) -> Iterator[Finding]:
    """Versions, and whether torch can use the GPUs."""
    text = ", ".join(f"{name} {version}" for name, version in facts.software.items())
    if facts.build:
        text += f", build {facts.build}"
    if facts.gpus.driver:
        text += f", NVIDIA driver {facts.gpus.driver}"
    yield _found(facts, "versions", "ok", text)
    if facts.host.unusable_gpus:
        what, _, fix = facts.host.unusable_gpus.partition("; ")
        yield _found(facts, "torch", "broken", what, fix)


def check_devices(facts: NodeFacts) -> Iterator[Finding]:
    """What computes here."""
    host, isa = facts.host, facts.host.devices[0].capability
    cores = f"{host.cores} cores with {isa} kernels, {format_bytes(host.free_memory)} of memory free"
    if isa == "portable" and not facts.gpu_names:
        fix = "use a CPU with AVX2 or AVX-512, or unset SHARDLINE_ISA"
        yield _found(facts, "CPU", "warning", f"{cores}: the slowest kernels", fix)
    else:
        yield _found(facts, "CPU", "ok", cores)
    if facts.known_answers_error:
        fix = "install torch and Shardline again; if the bits differ each time, test the memory (`dmesg | grep -i mce`)"
        yield _found(facts, "kernels", "broken", facts.known_answers_error, fix)
    elif facts.known_answers:
        yield _found(facts, "kernels", "ok", f"{', '.join(facts.known_answers)} give the same bits again and again")
    else:
        fix = "end other programs, and run the doctor again"
        yield _found(facts, "kernels", "warning", "not checked: this node is too busy to compute in time", fix)
    if facts.gpus.error:
        fix = "look at `nvidia-smi` and `dmesg | grep -i nvrm`; reload the driver, or restart the host"
        yield _found(facts, "GPUs", "broken", facts.gpus.error, fix)
    elif names := facts.gpu_names:
        kinds = sorted(set(names))
        text = ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)
        if len(kinds) > 1:
            fix = "ranks wait for the slowest GPU and get the KV cache of the smallest: choose equal ones with "
            yield _found(facts, "GPUs", "warning", f"unlike GPUs: {text}", fix + "CUDA_VISIBLE_DEVICES")
        else:
            yield _found(facts, "GPUs", "ok", text)


def check_peer_access(facts: NodeFacts) -> Iterator[Finding]:
    """Whether GPUs read each other's memory."""
    if len(facts.gpu_names) < 2:
        return
    links = ", ".join(facts.gpus.links) or "unknown links"
    if facts.gpus.without_peer_access:
        pairs = ", ".join(facts.gpus.without_peer_access)
        fix = (
            "NCCL copies through host memory: slower tensor parallelism, so prefer -pp. On servers, turn off PCIe ACS "
            "and the IOMMU (kernel option iommu=pt); consumer GPUs have no P2P"
        )
        yield _found(facts, "P2P", "warning", f"no peer access between GPUs {pairs} ({links})", fix)
    elif facts.nccl.get("NCCL_P2P_DISABLE", "0") != "0":
        yield _found(facts, "P2P", "warning", "NCCL_P2P_DISABLE turns peer access off", "unset NCCL_P2P_DISABLE")
    elif _SLOW_LINKS & set(facts.gpus.links):
        fix = "put the ranks of a tensor-parallel group on one socket with CUDA_VISIBLE_DEVICES, and use -pp across"
        yield _found(facts, "P2P", "warning", f"some GPUs are on different sockets ({links})", fix)
    else:
        yield _found(facts, "P2P", "ok", links)


def check_nccl(facts: NodeFacts) -> Iterator[Finding]:
    """Whether GPUs of one node exchange over NCCL, and how fast."""
    if facts.nccl_error:
        fix = "end other programs on the GPUs; then set NCCL_DEBUG=INFO and look at the output of `shardline serve`"
        yield _found(facts, "NCCL", "broken", facts.nccl_error, fix)
    elif facts.nccl_speed:
        text = f"{len(facts.gpu_names)} GPUs gather {facts.nccl_speed / 1e9:.1f} GB/s each"
        if facts.nccl_speed < _SLOW_NCCL:
            fix = "look at P2P and /dev/shm above; unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; prefer -pp"
            yield _found(facts, "NCCL", "warning", text, fix)
        else:
            yield _found(facts, "NCCL", "ok", text)


def check_shared_memory(facts: NodeFacts) -> Iterator[Finding]:
    """/dev/shm, which NCCL uses; CPU ranks share anonymous memory instead."""
    size = format_bytes(facts.shm_bytes) if facts.shm_bytes else "absent"
    if len(facts.gpu_names) > 1 and facts.shm_bytes < _LEAST_SHM:
        fix = "`docker run --ipc=host` or --shm-size=16g; in Kubernetes, an emptyDir with medium: Memory at /dev/shm"
        yield _found(facts, "/dev/shm", "broken", f"{size}; NCCL needs 1 GiB or more", fix)
    else:
        yield _found(facts, "/dev/shm", "ok", size)


def check_limits(facts: NodeFacts) -> Iterator[Finding]:
    """Locked memory and open files."""
    locked = "unlimited" if facts.memlock == UNLIMITED or facts.has_ipc_lock else format_bytes(facts.memlock)
    if facts.rdma and locked != "unlimited":
        fix = "`ulimit -l unlimited`; LimitMEMLOCK=infinity in systemd; --ulimit memlock=-1 or --cap-add=IPC_LOCK in "
        fix += "containers; capability IPC_LOCK in Kubernetes"
        yield _found(facts, "memlock", "broken", f"{locked}; RDMA locks its buffers", fix)
    else:
        yield _found(facts, "memlock", "ok", locked + ("" if facts.rdma else "; needed for RDMA only"))
    need, files = facts.max_connections + _SPARE_FILES, facts.open_files
    if files != UNLIMITED and files < need and facts.ports:
        fix = f"`ulimit -n {need}`, or LimitNOFILE={need} in systemd"
        if facts.open_files_hard not in (UNLIMITED,) and facts.open_files_hard < need:
            fix += f" (the hard limit is {facts.open_files_hard}: raise it as root)"
        text = f"{files}; --max-num-seqs and --max-num-waiting allow {facts.max_connections} connections"
        yield _found(facts, "open files", "warning", text, fix)
    else:
        yield _found(facts, "open files", "ok", "unlimited" if files == UNLIMITED else str(files))


def check_addresses(facts: NodeFacts) -> Iterator[Finding]:
    """The address for other nodes, and the host's own name."""
    if facts.num_nodes == 1:
        return
    if facts.address_error:
        what, _, fix = facts.address_error.partition("; ")
        yield _found(facts, "address", "broken", what, fix or "check --master-addr and the network")
    else:
        yield _found(facts, "address", "ok", facts.host.address)
    name = facts.host.name
    if not facts.name_addresses:
        fix = f"add a line with {facts.host.address or 'its address'} and {name} to /etc/hosts"
        yield _found(facts, "own name", "warning", f"{name} does not resolve", fix)
    elif all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in facts.name_addresses):
        text = f"{name} resolves to {', '.join(facts.name_addresses)}, which gloo and Ray tell to other nodes"
        fix = f"in /etc/hosts, give {name} the address {facts.host.address or 'of its network'}"
        yield _found(facts, "own name", "warning", text, fix)
    else:
        yield _found(facts, "own name", "ok", f"{name} is {', '.join(facts.name_addresses)}")


def check_ports(facts: NodeFacts) -> Iterator[Finding]:
    """Ports on which the server and the head listen. A server that runs already may have both."""
    states = [port.served for port in facts.ports if port.served]
    for port in facts.ports:
        place = f"{port.address} port {port.number}"
        if port.error and states:
            yield _found(facts, port.flag, "ok", f"{place}: Shardline runs here ({states[0]})")
        elif port.error:
            fix = f"`ss -ltnp 'sport = :{port.number}'` names the program; stop it, or choose another {port.flag}"
            yield _found(facts, port.flag, "broken", f"{place}: {port.error}", fix)
        else:
            yield _found(facts, port.flag, "ok", f"{place} is free")


def check_model(facts: NodeFacts) -> Iterator[Finding]:
    """Whether the model is here, or there is room for it."""
    model = facts.model
    if model.error:
        fix = f"`shardline download {model.name}`, or copy the folder again"
        yield _found(facts, "model", "broken", model.error, fix)
    elif model.folder:
        yield _found(facts, "model", "ok", model.folder)
    else:
        free = f"{format_bytes(model.cache_free)} free in {model.cache}"
        fix = f"`shardline download {model.name}`"
        if model.cache_free < _LITTLE_DISK:
            fix += "; set HF_HOME to a larger disk before"
        yield _found(facts, "model", "warning", f"{model.name} is not here; {free}", fix)


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_devices,
    check_peer_access,
    check_nccl,
    check_shared_memory,
    check_limits,
    check_addresses,
    check_ports,
    check_model,
)


def _found(facts: NodeFacts, item: str, verdict: Verdict, text: str, fix: str = "") -> Finding:
    return Finding(facts.name, item, verdict, text, fix)
