"""Plans before anything is rented: what fits, which layout, how fast, at what price. No torch, and no GPU needed.

from shardline.planner import Demand, find_model, format_plan, plan_on

print(format_plan(plan_on("4xH100-80GB", find_model("Qwen/Qwen3-32B"), Demand(8192))))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardline.planner.calibration import calibrated
    from shardline.planner.catalog import find_model
    from shardline.planner.layout import Demand, Layout, demand_for
    from shardline.planner.page import format_plan, plan_page
    from shardline.planner.report import plan_json
    from shardline.planner.search import Fixed, Option, Plan, plan_on
    from shardline.planner.simulation.simulate import simulate_plan
    from shardline.planner.simulation.workload import Workload

__all__ = [
    "Demand",
    "Fixed",
    "Layout",
    "Option",
    "Plan",
    "Workload",
    "calibrated",
    "demand_for",
    "find_model",
    "format_plan",
    "plan_json",
    "plan_on",
    "plan_page",
    "simulate_plan",
]

_HOMES = {
    "Demand": "layout",
    "Fixed": "search",
    "Layout": "layout",
    "Option": "search",
    "Plan": "search",
    "Workload": "simulation.workload",
    "calibrated": "calibration",
    "demand_for": "layout",
    "find_model": "catalog",
    "format_plan": "page",
    "plan_json": "report",
    "plan_on": "search",
    "plan_page": "page",
    "simulate_plan": "simulation.simulate",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a module of the package does not load the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'shardline.planner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"shardline.planner.{_HOMES[name]}"), name)
