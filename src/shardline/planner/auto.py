"""A plan for this host: `shardline serve M --parallel auto` and `shardline plan M --gpus here`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from shardline.config.engine import EngineConfig
from shardline.deployment.cpu_rates import measure_rates, storage_rate
from shardline.deployment.formats import choose_dtype
from shardline.deployment.here import probe_here
from shardline.deployment.layout import choose_layout
from shardline.deployment.machine import Device, Machine
from shardline.planner.catalog import find_model
from shardline.planner.cluster import Cluster, parse_cluster
from shardline.planner.hardware import GB, GIB, Gpu, GpuLink, find_gpu, known_gpus
from shardline.planner.layout import HOST_AXES, HOST_CHOICES, Demand, Layout
from shardline.planner.memory import bits_label, sized
from shardline.planner.planned_model import PlannedModel
from shardline.planner.search import Fixed, Plan, search
from shardline.planner.timing import Constants, Timing, shipped_timing

RUNNING, INPUT_LEN, OUTPUT_LEN = 16, 512, 128
_MOST_RANKS = 16
_SHOWN = 5
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
    input_len: int | None = None
    """None: the usual length, or less if the model has fewer positions."""
    output_len: int | None = None
    """None: as `input_len`."""


_USUAL_LOAD = HostLoad()
_NOTHING_GIVEN: Mapping[str, Any] = {}
_NO_PART_OF_NAME = re.compile(r"\b(nvidia|geforce|generation|hbm\d\w*|graphics|gpu|edition)\b", re.IGNORECASE)


def plan_here(
    config: EngineConfig,
    model: PlannedModel | None = None,
    machine: Machine | None = None,
    given: Mapping[str, Any] = _NOTHING_GIVEN,
    load: HostLoad = _USUAL_LOAD,
    storage_gbs: float | None = None,
) -> Plan:
    """The layouts of a configuration on this host; the first makes most tokens per second.

    `given` are the options that the user has set; those of `HOST_CHOICES` stay as they are. Without a `model` or a
    `machine`, they are those of the configuration. `storage_gbs`: at which weights come from a disk, if any do; None:
    it is measured.

    Raises:
        ValueError: no layout works, requests are too long, or a GPU of this host is unknown. The message says why.
    """
    if storage_gbs is not None and not (storage_gbs > 0 and config.model.weight_folder):
        raise ValueError("--storage-gbs must be above zero, and needs --offload-to")
    model = model or find_model(config.model.model, config.model.revision)
    model = model.with_dtype(choose_dtype(config.model.dtype, model.spec.dtype, model.rules))
    input_len, output_len = _lengths(load, config, model)
    machine = machine or probe_here(config)
    alone = sized(config, Layout("shardline")).parallel
    host = machine.hosts[0]
    devices = [host.devices[index] for index in host.of_kind(choose_layout(alone, machine).device)]
    if devices[0].cores:
        cluster = cpu_cluster(machine, min(devices[0].cores, _MOST_RANKS))
        timing = {"shardline": HOST_TIMING}
        if (folder := config.model.weight_folder) is not None:
            rate = storage_rate(Path(folder)) / GB if storage_gbs is None else storage_gbs
            cpus = tuple(replace(cpu, storage_gbs=rate) for cpu in cluster.gpus)
            cluster = dataclasses.replace(cluster, gpus=cpus)
    else:
        cluster, timing = dataclasses.replace(_known_cluster(devices), host=machine), dict(shipped_timing())
    sizes = {axis: given.get(f"{axis}_parallel_size") for axis in HOST_AXES}
    label, kv = config.model.quantization or bits_label(model), config.cache.kv_cache_dtype
    whole_experts = given.get(HOST_CHOICES[-1], config.parallel.needs_whole_experts or None)
    choices = Fixed(**sizes, whole_experts=whole_experts, weights=label, kv=kv, numerics=config.parallel.numerics)
    demand = Demand(0, input_len, output_len, running=load.running, options=given, config=config)
    plan = search(model, cluster, demand, "throughput", "shardline", choices, timing)
    if config.parallel.kernels == "torch":
        plan = _without_figures(plan)
    if plan.best is None:
        why = "none has the given sizes"
        if plan.options:
            why = f"with the fewest ranks: {plan.options[0].fit.why_not}"
        elif choices.num_ranks > cluster.num_gpus:
            most = f"a plan for it has at most {cluster.num_gpus} ({cluster.host_summary})"
            why = f"the given sizes make {choices.num_ranks} ranks, and {most}"
        raise ValueError(f"no layout works on this host: {why}")
    return plan


def _without_figures(plan: Plan) -> Plan:
    """The plan for torch's operations, whose rates are not known: the fewest ranks first, then tensor parallel."""
    options = [dataclasses.replace(option, speed=None) for option in plan.options]
    options.sort(key=lambda option: (not option.fits, option.layout.num_gpus, -option.layout.tensor))
    return dataclasses.replace(plan, options=tuple(options), recommended=0 if options and options[0].fits else None)


def _lengths(load: HostLoad, config: EngineConfig, model: PlannedModel) -> tuple[int, int]:
    """Tokens of a prompt and of an output.

    Raises:
        ValueError: a number is not above zero, or the requests are longer than the model or its stated limit.
    """
    for name, value in load._asdict().items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be above zero, got {value}")
    length, positions = config.model.max_model_len, model.spec.max_position_embeddings
    most = min(length, positions) if isinstance(length, int) else positions
    left = most // 2 if load.input_len is None else most - load.input_len
    output_len = load.output_len or (min(OUTPUT_LEN, left) if left > 0 else OUTPUT_LEN)
    input_len = load.input_len or max(1, min(INPUT_LEN, most - output_len))
    if (needed := input_len + output_len) > most:
        limit = f"--max-model-len {most}" if most < positions else f"the {most} positions of the model"
        raise ValueError(f"--input-len and --output-len make {needed} tokens, more than {limit}")
    return input_len, output_len


def chosen_config(plan: Plan) -> EngineConfig:
    """The user's configuration with the sizes of the chosen layout."""
    assert plan.best is not None
    assert plan.demand.config is not None
    return sized(plan.demand.config, plan.best.layout)


def path_here(plan: Plan) -> list[str]:
    """The steps to the choice, in words."""
    assert plan.best is not None
    if plan.best.speed is None:
        return [f"{plan.best.layout}: the fewest ranks that have room; how fast torch's operations are is not known"]
    path = [f"devices: {plan.cluster.host_summary}"]
    for option in plan.options[:_SHOWN]:
        if option.speed is not None:
            tokens, tpot = option.speed.output_tok_s.p50, 1e3 * option.speed.tpot.p50
            path.append(f"{option.layout}: {tokens:,.0f} tok/s, TPOT {tpot:.1f} ms")
    if refusals := [option.fit.why_not for option in plan.options if not option.fits]:
        number = f"{len(refusals)} layouts are refused, the first" if refusals[1:] else "one layout is refused"
        path.append(f"{number}: {refusals[0]}")
    return [*path, f"chosen for {plan.demand.load_summary}: {plan.best.layout}"]


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


def cpu_cluster(machine: Machine, max_ranks: int, threads: int | None = None) -> Cluster:
    """The first host's cores as a device that up to `max_ranks` ranks share. For `threads` see `measure_host`."""
    whole = measure_host(machine, threads)
    return Cluster((whole,) * max_ranks, 1, whole.link, whole.network_gbs * 1e9, machine, is_shared=True)


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
