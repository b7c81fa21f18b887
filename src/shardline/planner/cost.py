"""What a deployment costs, and when a managed API is cheaper. All prices are US dollars."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from shardline.models.step_work import StepWork
from shardline.planner.cluster import Cluster
from shardline.planner.hardware import GB
from shardline.planner.layout import Demand, Layout
from shardline.planner.search import Option, Plan, per_million
from shardline.planner.speed import layout_speed, layout_work

HOURS_PER_DAY = 24
HOURS_PER_MONTH = 720
SECONDS_PER_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True)
class ApiPrice:
    """Prices of a managed API for a million tokens."""

    input: float
    cached: float
    """Of input tokens whose prefix is cached."""
    output: float

    def per_token(self, demand: Demand) -> float:
        """Price of the mean token, input or output."""
        cached = min(demand.cached_len, demand.input_len)
        total = (demand.input_len - cached) * self.input + cached * self.cached + demand.output_len * self.output
        return total / (demand.input_len + demand.output_len) / _MILLION


def parse_api_price(text: str) -> ApiPrice:
    """The prices in "IN,CACHED,OUT".

    Raises:
        ValueError: the text has another form.
    """
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) != 3 or not all(0 <= price < math.inf for price in prices) or max(prices) == 0:
        raise ValueError(f"--api-price {text!r}: write dollars per million tokens as IN,CACHED,OUT, such as 3,0.3,15")
    return ApiPrice(*prices)


@dataclass(frozen=True)
class OtherPrices:
    """What a deployment costs besides its GPUs."""

    traffic: float = 0.0
    """For 1e9 bytes between nodes."""
    operations: float = 0.0
    """A month: people, monitoring, storage."""

    def __post_init__(self) -> None:
        """See that no price is below zero.

        Raises:
            ValueError: one is.
        """
        for flag, price in (("--traffic-price", self.traffic), ("--operations-price", self.operations)):
            if not 0 <= price < math.inf:
                raise ValueError(f"{flag} {price:g} must be at least 0")


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


def recommended_costs(plan: Plan, others: OtherPrices) -> Costs | None:
    """What the recommended layout costs; None: there is none, or a price is not known."""
    best = plan.best
    if best is None or best.price_per_hour is None or best.speed is None:
        return None
    demand = plan.demand
    dollars = best.price_per_hour[1]
    fixed = dollars + others.operations / HOURS_PER_MONTH
    most = dataclasses.replace(demand, rate=None, running=None)
    timing = plan.timing[best.layout.engine]
    full = layout_speed(plan.model, best.layout, plan.cluster, most, best.fit, timing).output_tok_s.p50
    inputs = demand.input_len / demand.output_len
    given = best.speed.output_tok_s.p50
    moved = traffic_per_output_token(plan, best)
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


def api_break_even(plan: Plan, api: ApiPrice, others: OtherPrices) -> float | None:
    """Tokens a day from which the recommended layout, paid on demand, is cheaper than the API.

    None: that is not known. inf: it never is.
    """
    best = plan.best
    if best is None or best.price_per_hour is None:
        return None
    per_day = HOURS_PER_DAY * (best.price_per_hour[1] + others.operations / HOURS_PER_MONTH)
    demand = plan.demand
    share = demand.output_len / (demand.input_len + demand.output_len)
    traffic = traffic_per_output_token(plan, best) * share / GB * others.traffic
    return break_even_tokens(per_day, api, demand, traffic)


def break_even_tokens(price_per_day: float, api: ApiPrice, demand: Demand, price_per_token: float = 0.0) -> float:
    """Tokens a day, input and output, from which reserved GPUs are cheaper than the API; inf: they never are.

    `price_per_day` is paid whether the GPUs are busy or not, and `price_per_token` for each token that they serve.
    """
    saved = api.per_token(demand) - price_per_token
    return price_per_day / saved if saved > 0 else math.inf


def traffic_per_output_token(plan: Plan, option: Option) -> float:
    """Bytes between nodes for an output token and its share of the prompt."""
    work = layout_work(plan.model, option.layout, option.fit)
    tokens = 1 + plan.demand.input_len / plan.demand.output_len
    return tokens * node_traffic(work, option.layout, plan.cluster)


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
