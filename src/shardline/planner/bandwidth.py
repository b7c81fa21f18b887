"""What each parallel axis moves over each link: the figures behind the choice of axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardline.config.topology import COORDINATES
from shardline.models.sizes import stage_spans
from shardline.planner.hardware import GB
from shardline.planner.layout import Layout
from shardline.planner.search import Option, Plan
from shardline.planner.speed import layout_work


@dataclass(frozen=True)
class AxisTraffic:
    """What one GPU receives if its model is divided along one axis only."""

    axis: str
    """The axis and its ranks, such as "tp4"."""
    bytes_per_token: float
    """For each token that the GPU computes."""
    exchanges: int
    """Of a step, one after the other."""
    step_bytes: float
    """In a decode step with the option's requests."""
    link_seconds: Mapping[str, float]
    """For each link, the time of the exchanges of a decode step."""


def axis_traffic(plan: Plan, option: Option) -> list[AxisTraffic]:
    """The traffic of every axis over as many GPUs as the option has, but at least two, with its formats and load."""
    assert option.speed is not None
    ranks, running = max(2, option.layout.num_gpus), option.speed.running
    constants = plan.timing[option.layout.engine].constants
    axes = []
    for axis, layout in _axes(plan, option, ranks):
        stages = stage_spans(plan.model.spec, layout.pipeline)
        try:
            work = layout_work(plan.model, layout, dataclasses.replace(option.fit, layout=layout, stages=stages))
        except ValueError:
            continue  # the heads cannot be divided so
        traffic = sum((exchange for exchange, _ in work.exchanges), work.hand_off)
        # Stages and replicas each have a part of the requests in a step.
        moved = traffic.num_bytes * running / (layout.pipeline * layout.data)
        waiting = traffic.num_messages * constants.message
        seconds = {name: waiting + moved / constants.link / rate for name, rate in link_rates(plan).items()}
        axes.append(AxisTraffic(f"{axis}{ranks}", traffic.num_bytes, traffic.num_messages, moved, seconds))
    return axes


def _axes(plan: Plan, option: Option, ranks: int) -> Iterator[tuple[str, Layout]]:
    for axis, name in COORDINATES.items():
        is_possible = axis != "pipeline" or ranks <= len(plan.model.spec.layers)
        if is_possible and (axis != "context" or option.layout.engine == "shardline"):
            yield name, option.layout.along(**{axis: ranks})
    if any(layer.feed_forward.routing for layer in plan.model.spec.layers):
        yield "ep", dataclasses.replace(option.layout.along(data=ranks), whole_experts=True)


def link_rates(plan: Plan) -> dict[str, float]:
    """Bytes per second of one direction of each link: that of a node, that of a host, and the network between nodes."""
    cluster = plan.cluster
    links = [
        (cluster.link.kind, cluster.link.gbs),
        ("pcie", cluster.slowest.pcie_gbs),
        ("network", cluster.network_bytes_per_second / GB),
    ]
    return {f"{kind} {gbs:g}": gbs * GB for kind, gbs in links}
