"""The layout of a deployment's ranks, and the device of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from shardline.config.engine import ParallelConfig
from shardline.config.topology import RankGrid
from shardline.deployment.deployment import CollectivesName, ExecutorName, RankPlacement
from shardline.deployment.machine import DeviceKind, Host, Machine


@dataclass(frozen=True)
class Layout:
    """The choices that depend only on the parallel configuration and the machine."""

    device: DeviceKind
    grid: RankGrid
    num_engines: int
    executor: ExecutorName
    collectives: CollectivesName
    placements: tuple[tuple[RankPlacement, ...], ...]
    """See `Deployment.placements`."""
    warnings: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks, summed over all engines."""
        return self.grid.world_size * self.num_engines

    @property
    def num_hosts(self) -> int:
        """Number of hosts on which ranks run."""
        return len({place.host for of_engine in self.placements for place in of_engine})

    @property
    def shares_gpus(self) -> bool:
        """Whether several ranks may run on one GPU. This is a test mode."""
        return self.device == "cuda" and self.collectives == "gloo"


def choose_layout(parallel: ParallelConfig, machine: Machine) -> Layout:
    """The requested layout, with a choice for everything that was left open.

    Raises:
        ValueError: the machine does not allow it. The message says what would work.
    """
    if parallel.context_parallel_size > 1:
        raise ValueError("context_parallel_size above 1 is not supported yet; use tensor_parallel_size instead")
    grid = RankGrid(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        data=parallel.lockstep,
        expert=parallel.tensor_parallel_size * parallel.lockstep if parallel.enable_expert_parallel else 1,
    )
    host = machine.hosts[0]
    executor = _choose_executor(parallel, grid)
    device, warnings = _choose_device(parallel, host)
    collectives = _choose_collectives(parallel, device, executor)
    num_ranks = grid.world_size * parallel.num_engines
    threads = _choose_threads(parallel, host, num_ranks)
    if threads * num_ranks > host.cores:
        warnings.append(
            f"{num_ranks} ranks of {threads} threads share {host.cores} cores: expect them to wait for each other"
        )
    if device == "cuda" and collectives == "gloo":
        warnings.append("collectives gloo on GPUs are a test mode: slow, through host memory; ranks may share a GPU")
    devices = _place_ranks(grid, parallel.num_engines, host, device, shared=collectives == "gloo")
    return Layout(
        device=device,
        grid=grid,
        num_engines=parallel.num_engines,
        executor=executor,
        collectives=collectives,
        placements=tuple(tuple(RankPlacement(0, index, threads) for index in of_engine) for of_engine in devices),
        warnings=tuple(warnings),
    )


def _choose_executor(parallel: ParallelConfig, grid: RankGrid) -> ExecutorName:
    executor, world = parallel.distributed_executor_backend, grid.world_size
    if executor == "auto":
        executor = "uni" if world == 1 else "mp"
    if executor == "uni" and world > 1:
        raise ValueError(f"distributed_executor_backend 'uni' runs one rank, and this layout has {world}; use 'mp'")
    return cast(ExecutorName, executor)


def _choose_device(parallel: ParallelConfig, host: Host) -> tuple[DeviceKind, list[str]]:
    """The kind of device, and the warnings about this choice."""
    has_gpus = bool(host.of_kind("cuda"))
    if parallel.device == "auto":
        if has_gpus or not host.unusable_gpus:
            return "cuda" if has_gpus else "cpu", []
        return "cpu", [f"{host.unusable_gpus}; until then ranks compute on the CPU (pass --device cpu to choose it)"]
    if parallel.device == "cuda" and not has_gpus:
        if host.unusable_gpus:
            raise ValueError(f"device cuda: {host.unusable_gpus}, or use --device cpu")
        raise ValueError("device cuda needs a GPU, and nvidia-smi shows none on this host; use --device cpu")
    return cast(DeviceKind, parallel.device), []


def _choose_collectives(parallel: ParallelConfig, device: DeviceKind, executor: ExecutorName) -> CollectivesName:
    asked = parallel.collectives
    if executor == "threads" and asked == "gloo":
        raise ValueError("collectives 'gloo' needs processes; use distributed_executor_backend 'mp'")
    if device == "cuda" and executor == "threads":
        raise ValueError("distributed_executor_backend 'threads' is for the CPU; use 'mp' with device cuda")
    if device == "cpu" and asked == "nccl":
        raise ValueError("collectives 'nccl' needs GPUs; use 'shm' or 'gloo' with device cpu")
    if device == "cuda" and asked == "shm":
        raise ValueError("collectives 'shm' move host memory; use 'nccl' with device cuda")
    if asked == "auto":
        return "nccl" if device == "cuda" else "shm"
    return cast(CollectivesName, asked)


def _choose_threads(parallel: ParallelConfig, host: Host, num_ranks: int) -> int:
    """CPU threads of each rank."""
    if parallel.cpu_threads is None:
        return max(1, host.cores // num_ranks)
    if parallel.cpu_threads > host.cores:
        raise ValueError(f"cpu_threads {parallel.cpu_threads} is more than the {host.cores} cores this process may use")
    return parallel.cpu_threads


def _place_ranks(
    grid: RankGrid, num_engines: int, host: Host, kind: DeviceKind, *, shared: bool
) -> list[tuple[int, ...]]:
    """For each engine, the device of each of its ranks: the CPU for all, or one GPU each, in order.

    With `shared` GPUs, every engine starts at the first GPU again.

    Raises:
        ValueError: there are fewer GPUs than ranks.
    """
    devices, world = host.of_kind(kind), grid.world_size
    if kind == "cpu":
        return [devices[:1] * world] * num_engines
    if shared:
        return [tuple(devices[rank % len(devices)] for rank in range(world))] * num_engines
    num_ranks = world * num_engines
    if len(devices) < num_ranks:
        raise ValueError(
            f"this layout has {num_ranks} ranks and this host {len(devices)} GPUs; use fewer ranks, or --device cpu, "
            "or, for tests only, --collectives gloo, which lets ranks share a GPU"
        )
    return [devices[engine * world : (engine + 1) * world] for engine in range(num_engines)]
