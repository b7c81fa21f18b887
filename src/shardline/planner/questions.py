"""Figures that the path to a plan asks for, beside those of the layouts."""

from __future__ import annotations

import dataclasses

from shardline.models.partition import Span
from shardline.models.planning import PlannedModel
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GB, GpuLink
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import Fit, fit
from shardline.planner.search import Option, Search, layout_work
from shardline.planner.timing import step_load

_EFFICIENCY_SIZES = (1, 2, 4, 8)


def tensor_efficiency(found: Search, option: Option, link_bytes_per_second: float) -> dict[int, float]:
    """For tensor-parallel sizes, the speed-up of a decode step divided by the size, if the link had this rate.

    The step has as many requests as one of the option's replicas. Memory is ignored.
    """
    assert option.speed is not None
    spec, layout = found.model.spec, option.layout
    running = option.speed.running / layout.data
    constants = found.timing[layout.engine].constants
    context = found.demand.input_len + found.demand.output_len / 2
    rate = link_bytes_per_second / GB
    times = {}
    for size in _EFFICIENCY_SIZES:
        link = GpuLink("any", rate, rate, size)
        gpus = (found.cluster.slowest,) * size
        alone = dataclasses.replace(layout, tensor=size, pipeline=1, data=1, whole_experts=False)
        try:
            work = layout_work(found.model, alone, dataclasses.replace(option.fit, stages=(Span(0, len(spec.layers)),)))
        except ValueError:
            continue
        cluster = dataclasses.replace(found.cluster, gpus=gpus, num_nodes=1, link=link)
        times[size] = step_load(work, cluster, running, context, 0, 0).seconds(constants)
    return {size: times[1] / time / size for size, time in times.items() if size > 1}


def turns_yes(found: Search, option: Option) -> list[str]:
    """What would make a refused layout fit: another format on the same ranks, or shorter requests."""
    layout = option.layout
    ranks = (layout.tensor, layout.pipeline, layout.data, layout.whole_experts)
    ways = [
        f"{one.layout.weights} weights, {one.layout.kv} KV cache"
        for one in found.options
        if one.fits and ranks == (one.layout.tensor, one.layout.pipeline, one.layout.data, one.layout.whole_experts)
    ]
    if option.fit.max_context > 1:
        ways.append(f"--max-model-len {option.fit.max_context}")
    return ways


def fewest_gpus(
    model: PlannedModel, cluster: Cluster, demand: Demand, label: str, engine: str, most: int = 64
) -> tuple[int, Fit] | None:
    """(GPUs, fit) of the fewest GPUs, over as many nodes as needed, on which weights of a label fit."""
    size = 1
    while size <= most:
        nodes = -(-size // 8)
        wide = dataclasses.replace(cluster, gpus=(cluster.smallest,) * min(8, size), num_nodes=nodes)
        layout = Layout(engine, min(8, size), nodes, weights=label)
        found = fit(model, layout, wide, demand)
        if found.verdict != "no":
            return size, found
        size *= 2
    return None
