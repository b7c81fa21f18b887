"""What the recommended layout costs by the hour, the month and the token."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster
from shardline.planner.cost import (
    HOURS_PER_DAY,
    HOURS_PER_MONTH,
    SECONDS_PER_HOUR,
    ApiPrice,
    OtherPrices,
    break_even_tokens,
    per_million,
)
from shardline.planner.hardware import GB
from shardline.planner.layout import Layout
from shardline.planner.search import Option, Search, layout_speed, layout_work

_NO_OTHERS = OtherPrices()


@dataclass(frozen=True)
class Costs:
    """US dollars on demand for the recommended layout."""

    per_hour: float
    """For the GPUs."""
    per_month: float
    """For the GPUs, the traffic between nodes and operations."""
    gpu_hours_per_month: float
    traffic_gb_per_month: float
    """1e9 bytes between nodes under the demanded load."""
    traffic_per_month: float
    operations_per_month: float
    input_per_million: float
    """For a million input tokens, if they bear all of the costs, under the demanded load."""
    output_per_million: float
    """The same for output tokens."""
    full_input_per_million: float
    """With as many requests as fit."""
    full_output_per_million: float


def recommended_costs(found: Search, others: OtherPrices = _NO_OTHERS) -> Costs | None:
    """What the recommended layout costs; None: there is none, or a price is not known."""
    best = _recommended(found)
    if best is None or best.price_per_hour is None or best.speed is None:
        return None
    demand = found.demand
    dollars = best.price_per_hour[1]
    fixed = dollars + others.operations / HOURS_PER_MONTH
    most = dataclasses.replace(demand, rate=None, running=None)
    timing = found.timing[best.layout.engine]
    full = layout_speed(found.model, best.layout, found.cluster, most, best.fit, timing).output_tok_s.p50
    inputs = demand.input_len / demand.output_len
    given = best.speed.output_tok_s.p50
    moved = traffic_per_output_token(found, best)
    traffic = moved / GB * others.traffic
    at_given, at_full = (per_million(fixed, speed) + 1e6 * traffic for speed in (given, full))
    gigabytes = moved / GB * given * SECONDS_PER_HOUR * HOURS_PER_MONTH
    return Costs(
        dollars,
        dollars * HOURS_PER_MONTH + gigabytes * others.traffic + others.operations,
        best.layout.num_gpus * HOURS_PER_MONTH,
        gigabytes,
        gigabytes * others.traffic,
        others.operations,
        at_given / inputs,
        at_given,
        at_full / inputs,
        at_full,
    )


def api_break_even(found: Search, api: ApiPrice, others: OtherPrices = _NO_OTHERS) -> float | None:
    """Tokens a day from which the recommended layout, paid on demand, is cheaper than the API.

    None: that is not known. inf: it never is.
    """
    best = _recommended(found)
    if best is None or best.price_per_hour is None:
        return None
    per_day = HOURS_PER_DAY * (best.price_per_hour[1] + others.operations / HOURS_PER_MONTH)
    demand = found.demand
    share = demand.output_len / (demand.input_len + demand.output_len)
    traffic = traffic_per_output_token(found, best) * share / GB * others.traffic
    return break_even_tokens(per_day, api, demand, traffic)


def traffic_per_output_token(found: Search, option: Option) -> float:
    """Bytes between nodes for an output token and its share of the prompt."""
    work = layout_work(found.model, option.layout, option.fit)
    tokens = 1 + found.demand.input_len / found.demand.output_len
    return tokens * node_traffic(work, option.layout, found.cluster)


def node_traffic(work: StepWork, layout: Layout, cluster: Cluster) -> float:
    """Bytes that cross from one node to another for each token that a layout computes, over all of its GPUs.

    Ranks fill node after node. A rank receives equal parts from all others, so those of other nodes count.
    """
    size, total = len(cluster.gpus), 0.0
    for traffic, ranks in work.exchanges:
        if ranks > size:
            # What ranks of whole experts receive is counted for a token of each replica.
            tokens = work.replicas if ranks == work.expert_ranks else 1
            total += ranks * traffic.num_bytes * (ranks - size) / (ranks - 1) / tokens * layout.pipeline
    nodes_of_replica = -(-layout.tensor * layout.pipeline // size)
    boundaries = min(nodes_of_replica, layout.pipeline) - 1
    return total + boundaries * layout.tensor * work.hand_off.num_bytes


def _recommended(found: Search) -> Option | None:
    return None if found.recommended is None else found.options[found.recommended]
