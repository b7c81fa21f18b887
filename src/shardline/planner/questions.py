"""Figures that the path to a plan asks for, beside those of the layouts."""

from __future__ import annotations

import dataclasses

from shardline.models.partition import Span
from shardline.planner.candidates import layouts
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GB, GpuLink
from shardline.planner.memory import Fit, fit
from shardline.planner.search import Option, Search, layout_work
from shardline.planner.timing import step_load

_EFFICIENCY_SIZES = (1, 2, 4, 8)
_USUAL_NODE = 8
"""GPUs of a node, if only a part of one is named."""


def tensor_efficiency(found: Search, option: Option, link_bytes_per_second: float | None = None) -> dict[int, float]:
    """For tensor-parallel sizes, the speed-up of a decode step divided by the size, if the link had this rate.

    None: the cluster's own link, which may join few GPUs only, or be slower between fewer. The step has as many
    requests as one of the option's replicas. Memory is ignored.
    """
    assert option.speed is not None
    spec, layout = found.model.spec, option.layout
    running = option.speed.running / layout.data
    constants = found.timing[layout.engine].constants
    context = found.demand.input_len + found.demand.output_len / 2
    times = {}
    for size in _EFFICIENCY_SIZES:
        joined = min(max(size, 2), max(len(found.cluster.gpus), 2))
        rate = (link_bytes_per_second or found.cluster.link_bytes_per_second(joined)) / GB
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


def fewest_gpus(found: Search, label: str, most: int = 64) -> Fit | None:
    """The layout on the fewest GPUs that holds weights of a label; None: more than `most` are needed.

    Up to the GPUs of the search, it is one of the search's own layouts. Beyond them, more of the smallest GPU are
    tried, in twice as many at a time and without replicas.
    """
    own = [one.fit for one in found.options if one.fits and one.layout.weights == label]
    if own:
        return min(own, key=_fewest_first)
    engine = found.options[0].layout.engine if found.options else "vllm"
    fixed = dataclasses.replace(found.fixed, weights=label, data=found.fixed.data or 1)
    size = 1
    while size <= most:
        if size > found.cluster.num_gpus:
            wide = _more_gpus(found.cluster, size)
            tried = (one for one in layouts(found.model, wide, engine, fixed) if one.num_gpus == size)
            fits = [one for one in (fit(found.model, layout, wide, found.demand) for layout in tried) if one.fits]
            if fits:
                return min(fits, key=_fewest_first)
        size *= 2
    return None


def _more_gpus(cluster: Cluster, num_gpus: int) -> Cluster:
    """So many of the cluster's smallest GPU, in nodes as large as its own if there are several, else of 8."""
    size = len(cluster.gpus) if cluster.num_nodes > 1 else max(_USUAL_NODE, len(cluster.gpus))
    size = min(size, num_gpus)
    return dataclasses.replace(cluster, gpus=(cluster.smallest,) * size, num_nodes=-(-num_gpus // size))


def _fewest_first(one: Fit) -> tuple[int, bool, bool, int, int]:
    """Sort key: few GPUs, then room for all requests, a KV cache that changes no answers, few replicas and stages."""
    layout = one.layout
    return layout.num_gpus, one.verdict == "tight", layout.kv != "auto", layout.data, layout.pipeline
