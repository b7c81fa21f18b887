"""Choose the parallel sizes for the devices of this host: `shardline serve M --parallel auto`."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardline.checkpoints.description import ModelDescription, read_model
from shardline.checkpoints.quantization import usual_rules
from shardline.config.engine import EngineConfig, ParallelConfig
from shardline.deployment.cpu_rates import measure_rates
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import probe_here
from shardline.deployment.layout import choose_layout
from shardline.deployment.machine import Device, Machine
from shardline.deployment.resolve import resolve
from shardline.models.step_work import StepWork, step_work
from shardline.models.stored_weights import StoredRules, StoredWeights
from shardline.planner.cluster import Cluster, parse_cluster
from shardline.planner.constants import Constants, Timing, shipped_timing
from shardline.planner.hardware import GIB, Gpu, GpuLink, find_gpu, known_gpus
from shardline.planner.options import flag_words
from shardline.planner.timing import Latency, Load, loop_latency, loop_steps

RUNNING, INPUT_LEN, OUTPUT_LEN = 16, 512, 128
_SHARED_MEMORY_GBS = 20.0
"""What a rank receives from another one through shared memory."""

HOST_TIMING = Timing(
    Constants(
        memory=0.95,
        cache=0.5,
        compute=0.95,
        link=0.5,
        message=4e-6,
        launch=2e-6,
        step=2.5e-4,
        request=8e-6,
        first=1e-3,
        shown=0.0,
        together=0.15,
        queue=0.5,
        attention=1.0,
        expanded=1.0,
        saturated=1.0,
    ),
    {"tpot": (0.7, 1.4), "ttft": (0.6, 2.0), "output_tok_s": (0.7, 1.4)},
)
"""Constants of this engine on a CPU, relative to what `measure_host` finds. See docs/planner.md for their errors."""


class HostLoad(NamedTuple):
    """The load for which a layout is chosen."""

    running: int = RUNNING
    input_len: int = INPUT_LEN
    output_len: int = OUTPUT_LEN


_USUAL_LOAD = HostLoad()


def measure_host(machine: Machine, threads: int | None = None) -> Gpu:
    """`threads` cores of the first host together, as one device; None: all cores."""
    host = machine.hosts[0]
    cpu = host.devices[host.of_kind("cpu")[0]]
    rates = measure_rates(threads or host.cores)
    return Gpu(
        vendor="this host",
        architecture="CPU",
        capability=cpu.capability,
        memory_gb=cpu.memory_total / 1e9,
        usable_gib=cpu.memory_free / GIB,
        bandwidth_gbs=rates.weight_bytes / 1e9,
        tflops={"bf16": rates.bf16 / 1e12, "fp32": rates.fp32 / 1e12},
        link=GpuLink("memory", _SHARED_MEMORY_GBS, _SHARED_MEMORY_GBS, host.cores),
        pcie_gbs=_SHARED_MEMORY_GBS,
        network_gbs=1.0,
        source="measured",
        name="CPU",
    )


def share_host(whole: Gpu, ranks: int) -> Cluster:
    """The host as `ranks` equal devices: its cores, and what they read, are divided."""
    part = Gpu(
        **{
            **{name: getattr(whole, name) for name in whole.__struct_fields__},
            "bandwidth_gbs": whole.bandwidth_gbs / ranks,
            "tflops": {name: rate / ranks for name, rate in whole.tflops.items()},
            "memory_gb": whole.memory_gb / ranks,
            "usable_gib": whole.usable_gib / ranks,
        }
    )
    return Cluster((part,) * ranks, 1, whole.link, whole.network_gbs * 1e9)


PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
_MOST_RANKS = 16
_NO_PART_OF_NAME = re.compile(r"\b(nvidia|geforce|generation|hbm\d\w*|graphics|gpu|edition)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Candidate:
    """A layout that `resolve` accepts, and its speed under the load."""

    parallel: ParallelConfig
    latency: Latency
    output_tokens_per_second: float
    """Of all replicas."""
    deployment: Deployment
    cluster: Cluster
    """The devices of all ranks."""
    constants: Constants

    def __str__(self) -> str:
        parallel = self.parallel
        sizes = (
            ("tp", parallel.tensor_parallel_size),
            ("pp", parallel.pipeline_parallel_size),
            ("dp", parallel.data_parallel_size),
        )
        words = [f"{axis}{size}" for axis, size in sizes if size > 1] + ["ep"] * parallel.enable_expert_parallel
        return " ".join(words) or "one rank"


@dataclass(frozen=True)
class Choice:
    """What was chosen, and how."""

    config: EngineConfig
    candidates: tuple[Candidate, ...]
    """The fastest first."""
    path: tuple[str, ...]
    """The steps to the choice, in words."""


def choose_parallel(config: EngineConfig, fixed: frozenset[str] = frozenset()) -> Choice:
    """The configuration with the layout that makes most tokens per second on this host.

    `fixed` names the fields of `config.parallel` that the user has set.

    Raises:
        ValueError: no layout works, or a GPU of this host is unknown. The message says why.
    """
    return choose_on(config, read_model(config.model), probe_here(config), fixed)


def choose_on(
    config: EngineConfig,
    model: ModelDescription,
    machine: Machine,
    fixed: frozenset[str] = frozenset(),
    load: HostLoad = _USUAL_LOAD,
) -> Choice:
    """`choose_parallel` for a model, a machine and a load that are known.

    Raises:
        ValueError: no layout works, or a GPU is unknown.
    """
    host = machine.hosts[0]
    alone = dataclasses.replace(
        config.parallel,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    devices = [host.devices[index] for index in host.of_kind(choose_layout(alone, machine).device)]
    path, candidates, refusals = [], [], []
    if devices[0].cores:
        whole, timing, max_ranks = measure_host(machine), HOST_TIMING, min(devices[0].cores, _MOST_RANKS)
        cluster = share_host(whole, 1)
        path.append(
            f"devices: {devices[0].cores} cores, measured: {whole.bandwidth_gbs:.0f} GB/s, "
            f"{whole.tflops['bf16'] * 1e3:.0f} GFLOP/s"
        )
    else:
        cluster = _known_cluster(devices)
        whole, timing, max_ranks = None, shipped_timing()["shardline"], len(devices)
        path.append(f"devices: {cluster.name}, {cluster.link.kind}")
    for parallel in _layouts(config.parallel, fixed, max_ranks):
        tried = dataclasses.replace(config, parallel=parallel)
        try:
            deployment = resolve(tried, model, machine)
        except ValueError as refusal:
            refusals.append(str(refusal))
            continue
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.data_parallel_size
        used = cluster.part(ranks) if whole is None else share_host(whole, ranks)
        candidates.append(_candidate(parallel, deployment, used, timing, load))
    if not candidates:
        raise ValueError(f"--parallel auto: no layout works on this host; with one rank: {refusals[0]}")
    candidates.sort(key=lambda candidate: -candidate.output_tokens_per_second)
    best = candidates[0]
    path += [
        f"{candidate}: {candidate.output_tokens_per_second:,.0f} tok/s, TPOT {1e3 * candidate.latency.tpot:.1f} ms"
        for candidate in candidates[:5]
    ]
    if refusals:
        number = f"{len(refusals)} layouts are refused, the first" if refusals[1:] else "one layout is refused"
        path.append(f"{number}: {refusals[0]}")
    path.append(f"chosen for {load.running} requests of {load.input_len} + {load.output_len} tokens: {best}")
    return Choice(dataclasses.replace(config, parallel=best.parallel), tuple(candidates), tuple(path))


def _layouts(parallel: ParallelConfig, fixed: frozenset[str], max_ranks: int) -> Iterator[ParallelConfig]:
    """Every product of sizes up to `max_ranks` ranks that keeps what the user has set; one rank first."""
    numbers = range(1, max_ranks + 1)

    def choices(name: str, values: range | tuple[bool, ...]) -> list[int]:
        return [getattr(parallel, name)] if name in fixed else list(values)

    for tensor in choices(PARALLEL_SIZES[0], numbers):
        for pipeline in choices(PARALLEL_SIZES[1], numbers):
            for data in choices(PARALLEL_SIZES[2], numbers):
                for whole in choices(PARALLEL_SIZES[3], (False, True)):
                    ranks = tensor * pipeline * data
                    if ranks > max(max_ranks, 1) or (whole and tensor * data == 1 and PARALLEL_SIZES[3] not in fixed):
                        continue
                    sizes = dict(zip(PARALLEL_SIZES, (tensor, pipeline, data, bool(whole)), strict=True))
                    yield dataclasses.replace(parallel, **sizes)  # type: ignore[arg-type]


def _candidate(
    parallel: ParallelConfig, deployment: Deployment, cluster: Cluster, timing: Timing, host_load: HostLoad
) -> Candidate:
    replicas, stages = parallel.data_parallel_size, parallel.pipeline_parallel_size
    lockstep = replicas if parallel.enable_expert_parallel else 1
    chunk = deployment.limits.max_num_batched_tokens
    load = Load(
        max(1.0, host_load.running / replicas), host_load.input_len, host_load.output_len, chunk, lockstep=lockstep
    )
    steps = loop_steps(deployment_work(deployment), cluster, load, stages)
    latency = loop_latency(steps, timing.constants)
    speed = replicas * latency.output_tokens_per_second
    return Candidate(parallel, latency, speed, deployment, cluster, timing.constants)


def deployment_work(deployment: Deployment) -> StepWork:
    """The work of the rank with the most weights."""
    spec = deployment.spec
    rules = usual_rules().get(deployment.weight_format.name, StoredRules())
    stored = StoredWeights(rules, deployment.dtype, lambda name: name)
    sizes = [rank.num_bytes for rank in deployment.weights]
    place = deployment.grid.place(max(range(len(sizes)), key=sizes.__getitem__))
    return step_work(
        spec,
        place,
        deployment.stages,
        stored,
        deployment.cache.dtype,
        "exact" if deployment.numerics == "exact" else "fast",
        whole_experts=deployment.expert_parallel,
    )


def _known_cluster(gpus: list[Device]) -> Cluster:
    """The GPUs of this host as the planner's hardware.

    Raises:
        ValueError: one is unknown.
    """
    names = [find_gpu(_gpu_name(gpu), known_gpus()).name for gpu in gpus]
    return parse_cluster("+".join(names), known_gpus())


def _gpu_name(gpu: Device) -> str:
    """The name that nvidia-smi gives, without what the planner's names do not have: "NVIDIA H100 80GB HBM3"."""
    plain = _NO_PART_OF_NAME.sub(" ", gpu.name)
    if re.search(r"hbm3\b", gpu.name, re.IGNORECASE) and "H100" in gpu.name:
        plain += " SXM5"
    return " ".join(plain.split()).replace("SXM4-", "SXM4 ")


def serve_command(choice: Choice, options: Mapping[str, Any]) -> str:
    """The command that starts the choice; `options` of the engine are those that the user has set."""
    parallel = choice.config.parallel
    words = ["shardline", "serve", choice.config.model.model, "--device", parallel.device]
    for name in PARALLEL_SIZES[:3]:
        size = getattr(parallel, name)
        words += [f"--{name.replace('_', '-')}", str(size)] if size > 1 else []
    words += ["--enable-expert-parallel"] * parallel.enable_expert_parallel
    return shlex.join(words + flag_words(options, skip=("model", "device", *PARALLEL_SIZES)))


def choice_json(choice: Choice, command: str) -> dict[str, Any]:
    """The choice as JSON data."""
    layouts = [
        {
            "tp": candidate.parallel.tensor_parallel_size,
            "pp": candidate.parallel.pipeline_parallel_size,
            "dp": candidate.parallel.data_parallel_size,
            "ep": candidate.parallel.enable_expert_parallel,
            "tpot_ms": round(1e3 * candidate.latency.tpot, 3),
            "output_tok_s": round(candidate.output_tokens_per_second, 1),
        }
        for candidate in choice.candidates
    ]
    return {"layouts": layouts, "recommended": 0, "path": choice.path, "commands": {"shardline": command}}
