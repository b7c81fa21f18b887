"""The layout of a deployment's ranks, and the device of each rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from msgspec.structs import replace as replace_struct

from shardline.config.parallel import ParallelConfig
from shardline.config.topology import RankGrid
from shardline.deployment.deployment import CollectivesName, ExecutorName, KernelsName, RankPlacement
from shardline.deployment.machine import Device, DeviceKind, Host, Machine

_HOST_STEP_TIMEOUT, _DEVICE_STEP_TIMEOUT = 10.0, 300.0
"""Defaults of --step-timeout in seconds. Devices and torch do not report single kernels, and may compile some in a
step."""


@dataclass(frozen=True)
class Layout:
    """The choices that depend only on the parallel configuration and the machine."""

    device: DeviceKind
    kernels: KernelsName
    grid: RankGrid
    num_engines: int
    executor: ExecutorName
    collectives: CollectivesName
    placements: tuple[tuple[RankPlacement, ...], ...]
    """See `Deployment.placements`."""
    warnings: tuple[str, ...]

    @property
    def step_timeout(self) -> float:
        """The default of --step-timeout, in seconds."""
        return _HOST_STEP_TIMEOUT if self.device == "cpu" and self.kernels != "torch" else _DEVICE_STEP_TIMEOUT

    @property
    def num_ranks(self) -> int:
        """Number of ranks, summed over all engines."""
        return self.grid.world_size * self.num_engines

    def ranks_on(self, host: int) -> list[tuple[int, int]]:
        """The ranks of a host, as pairs of an engine and a rank within it."""
        pairs = ((engine, rank) for engine, places in enumerate(self.placements) for rank in range(len(places)))
        return [(engine, rank) for engine, rank in pairs if self.placements[engine][rank].host == host]

    def devices_on(self, host: int, machine: Machine) -> list[Device]:
        """The devices of a host on which ranks run, each once."""
        used = {place.device for of_engine in self.placements for place in of_engine if place.host == host}
        return [machine.hosts[host].devices[device] for device in sorted(used)]

    @property
    def hosts(self) -> list[int]:
        """The hosts on which ranks run."""
        return sorted({place.host for of_engine in self.placements for place in of_engine})

    @property
    def splits_tensor_groups(self) -> bool:
        """Whether the ranks of a tensor-parallel group are on several hosts."""
        size = self.grid.sharing
        return any(
            len({place.host for place in places[first : first + size]}) > 1
            for places in self.placements
            for first in range(0, len(places), size)
        )

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks may run on one GPU. This is a test mode."""
        return self.device == "cuda" and self.collectives == "gloo"


def choose_layout(parallel: ParallelConfig, machine: Machine) -> Layout:
    """The requested layout, with a choice for everything that was left open.

    Raises:
        ValueError: the machine does not allow it. The message says what would work.
    """
    grid = RankGrid(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.context_parallel_size,
        data=parallel.lockstep,
    )
    if parallel.enable_expert_parallel:
        grid = replace_struct(grid, expert=grid.sharing * grid.data)
    executor = _choose_executor(parallel, grid)
    device, warnings = _choose_device(parallel, machine)
    collectives = _choose_collectives(parallel, device, executor)
    if executor == "threads" and len(machine.hosts) > 1:
        raise ValueError("distributed_executor_backend 'threads' runs in one process; use 'mp' with several nodes")
    shares_gpus = collectives == "gloo"
    placements = place_ranks(grid, parallel.num_engines, machine, device, shared=shares_gpus)
    threads = []
    for index, host in enumerate(machine.hosts):
        num_ranks = sum(place == index for of_engine in placements for place, _ in of_engine)
        threads.append(_choose_threads(parallel, host, max(1, num_ranks)))
        if threads[index] * num_ranks > host.cores:
            warnings.append(
                f"{num_ranks} ranks of {threads[index]} threads share {host.cores} cores and wait for each other; "
                "use fewer ranks, or fewer --cpu-threads"
            )
    if device == "cuda" and shares_gpus:
        warnings.append(
            "collectives gloo on GPUs are a test mode, slow and through host memory, in which ranks may share a GPU; "
            "leave --collectives out"
        )
    layout = Layout(
        device=device,
        kernels=_choose_kernels(parallel, device),
        grid=grid,
        num_engines=parallel.num_engines,
        executor=executor,
        collectives=collectives,
        placements=tuple(
            tuple(RankPlacement(host, index, threads[host]) for host, index in of_engine) for of_engine in placements
        ),
        warnings=tuple(warnings),
    )
    if not layout.splits_tensor_groups:
        return layout
    slow = (
        f"the {grid.sharing} ranks of a tensor-parallel group are on several hosts: every layer waits for the network "
        "four times; pipeline stages (-pp) or replicas (-dp) across hosts wait once a token or never"
    )
    return replace(layout, warnings=(*layout.warnings, slow))


def _choose_executor(parallel: ParallelConfig, grid: RankGrid) -> ExecutorName:
    executor, world = parallel.distributed_executor_backend, grid.world_size
    if executor in ("auto", "ray"):
        executor = "uni" if world == 1 else "mp"
    if executor == "uni" and world > 1:
        raise ValueError(f"distributed_executor_backend 'uni' runs one rank, and this layout has {world}; use 'mp'")
    return cast(ExecutorName, executor)


def _choose_device(parallel: ParallelConfig, machine: Machine) -> tuple[DeviceKind, list[str]]:
    """The kind of device, and the warnings about this choice."""
    if parallel.device in ("xpu", "mps"):
        kind = cast(DeviceKind, parallel.device)
        if lacking := [host for host in machine.hosts if not host.of_kind(kind)]:
            raise ValueError(f"device {kind}: torch finds none on {lacking[0].name}; use --device cpu")
        return kind, []
    with_gpus = [host for host in machine.hosts if host.of_kind("cuda")]
    without = [host for host in machine.hosts if not host.of_kind("cuda")]
    host = (without or with_gpus)[0]
    if with_gpus and without and parallel.device != "cpu":
        raise ValueError(f"{with_gpus[0].name} has GPUs and {host.name} has none; use --device cpu on all nodes")
    has_gpus = bool(with_gpus)
    if parallel.device == "auto":
        if has_gpus or not host.unusable_gpus:
            return "cuda" if has_gpus else "cpu", []
        return "cpu", [f"{host.unusable_gpus}; until then ranks compute on the CPU (pass --device cpu to choose it)"]
    if parallel.device == "cuda" and not has_gpus:
        if host.unusable_gpus:
            raise ValueError(f"device cuda: {host.unusable_gpus}, or use --device cpu")
        shown = "nvidia-smi shows none on this host; use --device cpu, or for AMD's GPUs --kernels torch"
        if parallel.kernels == "torch":
            shown = "neither nvidia-smi nor torch shows one on this host; use --device cpu"
        raise ValueError(f"device cuda needs a GPU, and {shown}")
    return cast(DeviceKind, parallel.device), []


def _choose_kernels(parallel: ParallelConfig, device: DeviceKind) -> KernelsName:
    if parallel.kernels == "triton" and device != "cuda":
        raise ValueError(f"kernels triton are for NVIDIA's GPUs; leave --kernels out with device {device}")
    if parallel.kernels == "auto":
        return "own" if device in ("cpu", "cuda") else "torch"
    return cast(KernelsName, parallel.kernels)


def _choose_collectives(parallel: ParallelConfig, device: DeviceKind, executor: ExecutorName) -> CollectivesName:
    asked = parallel.collectives
    if executor == "threads" and asked == "gloo":
        raise ValueError("collectives 'gloo' needs processes; use distributed_executor_backend 'mp'")
    if device != "cpu" and executor == "threads":
        raise ValueError(f"distributed_executor_backend 'threads' is for the CPU; use 'mp' with device {device}")
    if device == "cpu" and asked == "nccl":
        raise ValueError("collectives 'nccl' needs GPUs; use 'shm' or 'gloo' with device cpu")
    if device != "cpu" and asked == "shm":
        fix = "nccl" if device == "cuda" else "gloo"
        raise ValueError(f"collectives 'shm' move host memory; use '{fix}' with device {device}")
    if device not in ("cpu", "cuda") and asked == "nccl":
        raise ValueError(f"collectives 'nccl' are for device cuda; use 'gloo' with device {device}")
    if asked == "auto":
        return {"cpu": "shm", "cuda": "nccl"}.get(device, "gloo")  # type: ignore[return-value]
    return cast(CollectivesName, asked)


def _choose_threads(parallel: ParallelConfig, host: Host, num_ranks: int) -> int:
    """CPU threads of each rank."""
    if parallel.cpu_threads is None:
        return max(1, host.cores // num_ranks)
    if parallel.cpu_threads > host.cores:
        raise ValueError(f"cpu_threads {parallel.cpu_threads} is more than the {host.cores} cores this process may use")
    return parallel.cpu_threads


def place_ranks(
    grid: RankGrid, num_engines: int, machine: Machine, kind: DeviceKind, *, shared: bool
) -> list[tuple[tuple[int, int], ...]]:
    """For each engine, the host and the device of each of its ranks.

    Consecutive ranks fill a host before the next one gets any. On a CPU, all ranks of a host compute on its one device,
    and hosts get equal shares. On GPUs, each rank has one. With `shared` GPUs, every engine starts at the first one.

    Raises:
        ValueError: there are fewer GPUs than ranks, or fewer ranks than hosts.
    """
    world, shares = grid.world_size, _share_ranks(grid, num_engines, machine, kind, shared=shared)
    places: list[tuple[int, int]] = []
    for index, (host, count) in enumerate(zip(machine.hosts, shares, strict=True)):
        devices = host.of_kind(kind)
        if kind == "cuda" and not shared and len(devices) < count:
            name = host.name if len(machine.hosts) > 1 else "this host"
            raise ValueError(_too_few_gpus(count, f"{name} {len(devices)}"))
        places += [
            (index, devices[position % (world if shared else count) % len(devices)]) for position in range(count)
        ]
    return [tuple(places[engine * world : (engine + 1) * world]) for engine in range(num_engines)]


def _share_ranks(grid: RankGrid, num_engines: int, machine: Machine, kind: DeviceKind, *, shared: bool) -> list[int]:
    """The number of ranks of each host."""
    hosts, num_ranks = machine.hosts, grid.world_size * num_engines
    if any(host.num_ranks for host in hosts):
        return [host.num_ranks for host in hosts]
    if any(host.num_replicas for host in hosts):
        return [host.num_replicas * grid.replica_size for host in hosts]
    if len(hosts) == 1:
        return [num_ranks]
    if num_ranks < len(hosts):
        raise ValueError(
            f"{len(hosts)} nodes are more than the {num_ranks} ranks of this layout; use --nnodes {num_ranks}"
        )
    # Whole tensor-parallel groups, if there are enough of them.
    unit = grid.sharing if num_ranks // grid.sharing >= len(hosts) else 1
    units = num_ranks // unit
    even = [(units * (index + 1) // len(hosts) - units * index // len(hosts)) * unit for index in range(len(hosts))]
    if (
        kind == "cpu"
        or shared
        or all(len(host.of_kind(kind)) >= count for host, count in zip(hosts, even, strict=True))
    ):
        return even
    filled, left = [], num_ranks
    for host in hosts:
        filled.append(min(left, len(host.of_kind(kind))))
        left -= filled[-1]
    if left:
        raise ValueError(_too_few_gpus(num_ranks, f"the {len(hosts)} nodes {num_ranks - left}"))
    return filled


def _too_few_gpus(num_ranks: int, found: str) -> str:
    return (
        f"this layout has {num_ranks} ranks and {found} GPUs; use fewer ranks, or --device cpu, or, for tests only, "
        "--collectives gloo, which lets ranks share a GPU"
    )
