"""What may be wrong between nodes: unlike nodes, and slow or broken links. Node 0 is compared with each other node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from shardline.doctor.facts import Finding, Link, NodeFacts, Verdict

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
    """Versions, flags and models that must be equal."""
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
        yield Finding(where, "GPUs", unlike, text, "use nodes with equal GPUs, or one replica per kind of GPU")
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
