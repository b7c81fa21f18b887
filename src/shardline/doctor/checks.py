"""What may be wrong with a node, between nodes, and with what would run on them. Each check is a function of facts."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from shardline.checkpoints.description import read_models
from shardline.checkpoints.hub import find_local_model
from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes
from shardline.deployment.generations import generation_of
from shardline.deployment.layout import choose_layout
from shardline.deployment.machine import Host, Machine
from shardline.deployment.resolve import resolve
from shardline.doctor.facts import UNLIMITED, Finding, Link, NodeFacts, Verdict

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
    elif devices := facts.host.devices[1:]:  # the first one is the CPU
        names = [device.name for device in devices]
        kinds = sorted(set(names))
        text = ", ".join(f"{names.count(kind)} x {kind}" for kind in kinds)
        computed = sorted({str(known) for known in map(generation_of, devices) if known is not None})
        text += f" ({'; '.join(computed)})" * bool(computed)
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


_LATENCY = 0.001
_BYTES_PER_SECOND = 100e6
_UNLIKE_DIRECTIONS = 3.0
_CLOCK_SECONDS = 1.0

Comparison = Callable[[NodeFacts, NodeFacts], Iterator[Finding]]


def check_cluster(nodes: Sequence[NodeFacts], links: Sequence[Link], clocks: Mapping[int, float]) -> list[Finding]:
    """All findings between nodes. `clocks`: seconds by which a node's clock is ahead of that of the first node."""
    found: list[Finding] = []
    for other in nodes[1:]:
        found += [finding for compare in COMPARISONS for finding in compare(nodes[0], other)]
        if other.node in clocks:
            found.append(check_clock(nodes[0], other, clocks[other.node]))
    names = {facts.node: facts for facts in nodes}
    for link in links:
        back = next((one for one in links if (one.source, one.target) == (link.target, link.source)), None)
        if link.error or back is None or back.error:
            found += check_broken_link(names[link.source], names[link.target], link)
        elif link.source < link.target:
            found += check_link(names[link.source], names[link.target], link, back)
    return found


def compare_versions(head: NodeFacts, other: NodeFacts) -> Iterator[Finding]:
    where, count = _between(head, other), 0
    for what, prefix, ours, theirs in (
        ("version", "", head.software, other.software),
        ("flag", "--", head.flags, other.flags),
    ):
        for name in sorted(ours.keys() | theirs.keys()):
            mine, its = ours.get(name, "none"), theirs.get(name, "none")
            if mine != its:
                count += 1
                text = f"{prefix}{name} is {mine} on {head.label} and {its} on {other.label}"
                fix = "start all nodes with the same flags" if prefix else "install the same versions, or one image"
                yield Finding(where, what, "broken", text, fix)
    if head.build != other.build and head.software == other.software:
        count += 1
        text = f"builds {head.build} and {other.build} of Shardline differ, although their versions are equal"
        yield Finding(where, "version", "broken", text, "install one image or one wheel on both")
    if not count:
        yield Finding(where, "versions and flags", "ok", "equal")
    if head.model.digest and other.model.digest and head.model.digest != other.model.digest:
        text = f"{head.model.folder} and {other.model.folder} differ in config.json or in their weight files"
        fix = f"`shardline download {head.model.name}` with one --revision on both, or copy one over the other"
        yield Finding(where, "model", "broken", text, fix)


def compare_devices(head: NodeFacts, other: NodeFacts) -> Iterator[Finding]:
    """Instruction sets, GPUs and drivers."""
    where, isa = _between(head, other), head.host.devices[0].capability
    unlike: Verdict = "warning" if head.flags.get("numerics") == "fast" else "broken"
    if isa not in other.isas:
        both = [name for name in other.isas if name in head.isas]
        text = f"{head.label} computes with {isa}, and {other.label} has {', '.join(other.isas)}"
        yield Finding(where, "CPU", unlike, text, f"set SHARDLINE_ISA={both[-1] if both else 'portable'} on the head")
    mine, its = head.known_answers.get(isa), other.known_answers.get(isa)
    if mine and its and mine != its:
        text = f"the {isa} kernels give other bits on {head.label} and {other.label}: answers would depend on the node"
        fix = "install one image, test both memories (`dmesg | grep -i mce`), or set SHARDLINE_ISA=portable on the head"
        yield Finding(where, "kernels", "broken", text, fix)
    ours, theirs = head.host.gpu_architectures, other.host.gpu_architectures
    if ours and theirs and ours != theirs:
        text = f"unlike architectures, {', '.join(ours)} and {', '.join(theirs)}: their bits differ"
        yield Finding(where, "GPUs", unlike, text, "use nodes with equal GPUs, or --numerics fast")
    elif set(head.gpu_names) != set(other.gpu_names):
        text = f"{_kinds(head)} and {_kinds(other)}"
        yield Finding(where, "GPUs", "warning", text, "ranks wait for the slowest: use nodes with equal GPUs")
    if head.gpus.driver and other.gpus.driver and head.gpus.driver != other.gpus.driver:
        text = f"drivers {head.gpus.driver} and {other.gpus.driver}"
        yield Finding(where, "drivers", "warning", text, "install the same driver on all nodes")


def compare_rdma(head: NodeFacts, other: NodeFacts) -> Iterator[Finding]:
    """Whether NCCL can use RDMA between two nodes with GPUs."""
    if not (head.gpu_names and other.gpu_names):
        return
    where = _between(head, other)
    disabled = [facts.label for facts in (head, other) if facts.nccl.get("NCCL_IB_DISABLE", "0") != "0"]
    absent = [facts.label for facts in (head, other) if not facts.rdma]
    if disabled:
        text = f"NCCL_IB_DISABLE is set on {' and '.join(disabled)}: NCCL falls back to TCP"
        yield Finding(where, "RDMA", "warning", text, "unset NCCL_IB_DISABLE")
    elif absent:
        text = f"{' and '.join(absent)} has no active InfiniBand or RoCE port: NCCL falls back to TCP"
        fix = (
            "keep tensor parallelism inside a node (-tp) and use -pp or -dp across; in containers, pass /dev/infiniband"
        )
        yield Finding(where, "RDMA", "warning", text, fix)
    else:
        yield Finding(where, "RDMA", "ok", f"{head.rdma[0]}, {other.rdma[0]}")


def check_clock(head: NodeFacts, other: NodeFacts, skew: float) -> Finding:
    """`skew`: seconds by which the clock of `other` is ahead."""
    where, text = _between(head, other), f"{abs(skew) * 1e3:.1f} ms apart"
    if abs(skew) <= _CLOCK_SECONDS:
        return Finding(where, "clocks", "ok", text)
    text = f"{abs(skew):.1f} s apart: the times in logs do not match, and TLS certificates may fail"
    return Finding(where, "clocks", "warning", text, "start chrony or systemd-timesyncd on both")


def check_broken_link(source: NodeFacts, target: NodeFacts, link: Link) -> Iterator[Finding]:
    """No connection came about in one of the directions."""
    if link.error:
        where = f"{source.name} to {target.name}"
        fix = "ranks connect on any port: open all TCP ports between the nodes, or set SHARDLINE_HOST_IP on both to "
        yield Finding(where, "TCP", "broken", link.error, fix + "addresses of a network that joins them")


def check_link(one: NodeFacts, other: NodeFacts, there: Link, back: Link) -> Iterator[Finding]:
    """Latency and bandwidth of TCP."""
    where = _between(one, other)
    latency = min(there.latency, back.latency)
    text = f"{latency * 1e6:.0f} µs for a round trip"
    if latency > _LATENCY:
        fix = "tensor parallelism waits for this four times a layer: keep -tp inside a node, and use -pp or -dp across"
        yield Finding(where, "latency", "warning", text, fix)
    else:
        yield Finding(where, "latency", "ok", text)
    rates = there.bytes_per_second, back.bytes_per_second
    text = f"{rates[0] * 8e-9:.2f} Gb/s there, {rates[1] * 8e-9:.2f} back"
    if min(rates) < _BYTES_PER_SECOND:
        fix = "look for a slow or shared interface (`ethtool`, SHARDLINE_HOST_IP); use -dp across nodes"
        yield Finding(where, "TCP bandwidth", "warning", f"{text}: less than gigabit Ethernet", fix)
    elif max(rates) > _UNLIKE_DIRECTIONS * min(rates):
        fix = "look for errors and duplex settings (`ethtool -S`, `ip -s link`), or for other traffic"
        yield Finding(where, "TCP bandwidth", "warning", text, fix)
    else:
        yield Finding(where, "TCP bandwidth", "ok", text)


COMPARISONS: tuple[Comparison, ...] = (compare_versions, compare_devices, compare_rdma)


def _between(one: NodeFacts, other: NodeFacts) -> str:
    return f"{one.name} and {other.name}"


def _kinds(facts: NodeFacts) -> str:
    return ", ".join(sorted(set(facts.gpu_names))) or "no GPU"


def check_deployment(config: EngineConfig, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Whether flags, model and hardware go together: what `shardline serve` would decide before it loads anything, on
    all nodes of a cluster, the head first. On a Ray cluster, only Ray knows the nodes."""
    if config.places_with_ray:
        return
    where, machine = nodes[0].name, Machine(tuple(_as_at_a_start(facts) for facts in nodes))
    model = nodes[0].model
    try:
        layout = choose_layout(config.parallel, machine)
        if not model.folder:
            return
        # The doctor asks no hub, not even for another tokenizer.
        local = dataclasses.replace(config.model, model=model.folder, tokenizer=None)
        second = config.scheduler.speculation.draft
        access = config.model.hub_access
        if second is not None and second.model and find_local_model(second.model, second.revision, access) is None:
            text = f"the draft model {second.model} is not on this node, so the layout was not checked"
            yield Finding(where, "layout", "warning", text, f"shardline download {second.model}")
            return
        deployment = resolve(config, read_models(dataclasses.replace(config, model=local)), machine)
    except (ValueError, OSError) as error:
        what, _, fix = str(error).partition("; ")
        yield Finding(where, "layout", "broken", what, fix or "change the flags that it names")
        return
    for warning in deployment.warnings:
        what, _, fix = warning.partition("; ")
        yield Finding(where, "layout", "warning", what, fix)
    if not deployment.warnings:
        text = f"ranks on {layout.device}: {layout.num_ranks}; tokens of a request: up to {deployment.max_model_len:,}"
        yield Finding(where, "layout", "ok", text)


def _as_at_a_start(facts: NodeFacts) -> Host:
    """The node's hardware; what a server that runs there already uses counts as free."""
    if not any(port.served for port in facts.ports):
        return facts.host
    devices = tuple(msgspec.structs.replace(device, memory_free=device.memory_total) for device in facts.host.devices)
    return msgspec.structs.replace(facts.host, free_memory=devices[0].memory_total, devices=devices)
