"""`shardline plan MODEL --gpus 4xH100-80GB`: what fits, which layout, how fast, at what price. No GPU is needed."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import add_engine_flags, engine_config
from shardline.cli.plan_demand import demanded, fixed_choices, given_options
from shardline.cli.plan_flags import add_plan_flags, check_flags, read_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardline.checkpoints.planning import PlannedModel
    from shardline.planner.hardware import Gpu
    from shardline.planner.layout import Demand
    from shardline.planner.search import Fixed, Option, Plan
    from shardline.planner.simulation.report import Simulation
    from shardline.planner.simulation.workload import SimulatedRequest

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_NODE = 8
"""GPUs of a node, if no number is given."""
_USUAL_PROMPTS = 1000


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    description = "Plan a deployment before anything is rented: memory, layouts, speed and cost, with the reasons."
    parser = commands.add_parser("plan", help="what fits, how fast, at what price", description=description)
    flags = add_plan_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, plan_flags=flags)


def run(args: argparse.Namespace) -> int:
    """Print a plan, or the errors of predictions.

    Raises:
        ValueError: the model, the GPUs or a number is at fault.
    """
    from shardline.planner.hardware import known_gpus

    check_flags(args)
    gpus = known_gpus(args.hardware)
    if args.validate is not None:
        return _validate(args, gpus)
    if not hasattr(args, "model"):
        raise ValueError(
            "name a model, for example shardline plan meta-llama/Llama-3.1-70B-Instruct --gpus 4xH100-80GB"
        )
    if not args.gpus:
        raise ValueError("--gpus is missing; write for example --gpus 4xH100-80GB, or --gpus any")
    return _plan(args, gpus)


def _plan(args: argparse.Namespace, gpus: Mapping[str, Gpu]) -> int:
    from shardline.planner.catalog import find_model
    from shardline.planner.cost import OtherPrices, parse_api_price
    from shardline.planner.options import check_options, in_dtype
    from shardline.planner.report import format_plan, plan_json

    api = None if args.api_price is None else parse_api_price(args.api_price)
    others = OtherPrices(args.traffic_price, args.operations_price)
    others.check()
    model = find_model(args.model, getattr(args, "revision", None))
    if args.gpus == "here":
        return _plan_here(args, model)
    check_options(given_options(args))
    model = in_dtype(model, getattr(args, "dtype", "auto"))
    trace = _trace(args)
    demand, fixed = demanded(args, model, trace), fixed_choices(args, model)
    found = _search(args, gpus, model, demand, fixed)
    if args.calibrate is not None:
        found = _calibrated(args.calibrate, found, fixed)
    simulation = _simulate(args, found, trace) if args.simulate else None
    # What few plans ask for is imported only then: a plan takes half a second in all.
    pair: list[Option] = []
    if args.compare:
        from shardline.planner.compare import compared

        pair = compared(found, args.compare)
    if args.json:
        extra = _comparison_json(found, pair) | _simulation_json(simulation)
        told = json.dumps(plan_json(found, api, others) | extra, indent=1)
    if args.html is not None or not args.json:
        text = format_plan(found, show_all=args.all, api=api, others=others)
        text += _comparison(found, pair) + _simulation(simulation)
        if args.html is not None:
            _write_html(args.html, found, text, simulation)
    print(told if args.json else text)
    return 0


def _comparison(plan: Plan, pair: list[Option]) -> str:
    if not pair:
        return ""
    from shardline.planner.compare import format_comparison

    return format_comparison(plan, pair)


def _comparison_json(plan: Plan, pair: list[Option]) -> dict[str, Any]:
    if not pair:
        return {}
    from shardline.planner.compare import comparison_swaps
    from shardline.planner.report import option_json

    return {"comparison": {"layouts": [option_json(one) for one in pair], "swaps": comparison_swaps(plan, pair)}}


def _simulation(simulation: Simulation | None) -> str:
    if simulation is None:
        return ""
    from shardline.planner.simulation.report import format_simulation

    return "\n" + format_simulation(simulation)


def _simulation_json(simulation: Simulation | None) -> dict[str, Any]:
    if simulation is None:
        return {}
    from shardline.planner.simulation.report import simulation_json

    return {"simulation": simulation_json(simulation)}


def _write_html(path: Path, plan: Plan, text: str, simulation: Simulation | None) -> None:
    from shardline.planner.html import plan_html

    try:
        path.write_text(plan_html(plan, text, simulation), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html {path} cannot be written: {error.strerror}") from None


def _plan_here(args: argparse.Namespace, model: PlannedModel) -> int:
    """Plan for the devices of this host. A CPU is measured.

    Raises:
        ValueError: this engine cannot run the model on it.
    """
    from shardline.deployment.here import probe_here
    from shardline.planner.auto import PARALLEL_SIZES, choose_on
    from shardline.planner.catalog import describe
    from shardline.planner.options import check_nodes, flag_words

    given = given_options(args)
    check_nodes(given)
    fixed = frozenset(name for name in PARALLEL_SIZES if name in given)
    config = engine_config(args)
    choice = choose_on(config, describe(model, checked=False), probe_here(config), fixed)
    sizes = choice.config.parallel
    words = ["shardline", "serve", args.model, "--device", config.parallel.device]
    for name in PARALLEL_SIZES[:3]:
        words += [f"--{name.replace('_', '-')}", str(getattr(sizes, name))] if getattr(sizes, name) > 1 else []
    words += ["--enable-expert-parallel"] * sizes.enable_expert_parallel
    command = shlex.join(words + flag_words(given, skip=("model", "device", *PARALLEL_SIZES)))
    if args.json:
        layouts = [
            {
                "tp": one.parallel.tensor_parallel_size,
                "pp": one.parallel.pipeline_parallel_size,
                "dp": one.parallel.data_parallel_size,
                "ep": one.parallel.enable_expert_parallel,
                "tpot_ms": round(1e3 * one.latency.tpot, 3),
                "output_tok_s": round(one.output_tokens_per_second, 1),
            }
            for one in choice.candidates
        ]
        plan = {"layouts": layouts, "recommended": 0, "path": choice.path, "commands": {"shardline": command}}
        print(json.dumps(plan, indent=1))
    else:
        print("\n".join((*choice.path, f"run: {command}")))
    return 0


def _calibrated(path: Path, plan: Plan, fixed: Fixed) -> Plan:
    """The same search on the machine that a benchmark or a start-up log shows.

    Raises:
        ValueError: the file cannot be read, or no layout fits that can have been measured.
    """
    from shardline.planner.calibration import (
        calibrated_timing,
        is_log,
        measured_layout,
        read_benchmark,
        read_log,
        with_log,
    )
    from shardline.planner.search import search

    cluster, timing = plan.cluster, plan.timing
    if is_log(path):
        logged = read_log(path)
        cluster = with_log(cluster, measured_layout(plan), path, logged, plan.demand.utilization)
    else:
        results = read_benchmark(path)
        timing = calibrated_timing(plan, measured_layout(plan), results)
    engine = plan.options[0].layout.engine
    return search(plan.model, cluster, plan.demand, plan.goal, engine, fixed, timing)


def _trace(args: argparse.Namespace) -> list[SimulatedRequest]:
    """The requests of --trace; none without it.

    Raises:
        ValueError: it is broken, or the number of requests is.
    """
    if args.trace is None:
        return []
    from shardline.planner.simulation.workload import read_trace

    if args.num_prompts is not None and args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    return read_trace(args.trace)[: args.num_prompts]


def _simulate(args: argparse.Namespace, plan: Plan, trace: list[SimulatedRequest]) -> Simulation:
    """Simulate the workload of the flags on the recommended layout.

    Raises:
        ValueError: there is no such layout, or a flag is wrong.
    """
    from shardline.planner.simulation.report import Progress
    from shardline.planner.simulation.simulate import replica_setup, simulate
    from shardline.planner.simulation.workload import Prefixes, poisson

    if not plan.options or not plan.options[0].fits:
        raise ValueError("--simulate needs a layout that fits; the plan without it says what would")
    for name in ("num_prompts", "num_prefixes", "replicas", "prefix_len"):
        value = getattr(args, name)
        if value is not None and value < (name != "prefix_len"):
            raise ValueError(f"--{name.replace('_', '-')} must be at least {int(name != 'prefix_len')}, got {value}")
    best, config = plan.options[0], engine_config(args)
    rate = math.inf if args.rate is None else args.rate
    interval = read_time("--report-interval", args.report_interval)
    assert interval is not None
    assert best.speed is not None
    replicas = args.replicas or best.layout.data
    tokens_per_second = best.speed.output_tok_s.p50 * replicas / best.layout.data
    requests: Iterable[SimulatedRequest]
    if trace:
        requests, count, last = trace, len(trace), trace[-1].arrival
        tokens = sum(request.output_len for request in trace)
    else:
        prefixes, count = Prefixes(args.prefix_len, args.num_prefixes), args.num_prompts or _USUAL_PROMPTS
        lengths = plan.demand.input_len, plan.demand.output_len
        requests = poisson(rate, count, *lengths, prefixes, config.model.seed)
        last, tokens = count / rate, count * plan.demand.output_len
    return simulate(
        replica_setup(plan, best, prefix_caching=config.cache.enable_prefix_caching),
        requests,
        plan.demand,
        num_replicas=replicas,
        policy=config.parallel.router_policy,
        report_seconds=interval,
        # It ends about when the last request has come, or when all tokens can have been made.
        duration=max(last, tokens / tokens_per_second),
        progress=Progress.on_stderr(count),
    )


def _search(args: argparse.Namespace, gpus: Mapping[str, Gpu], model: Any, demand: Demand, fixed: Fixed) -> Any:
    """The search on the named GPUs, on the fewest of a kind, or on the cheapest of all kinds.

    Raises:
        ValueError: the GPUs are unknown, or no layout can have the parallel sizes that the user fixed.
    """
    from shardline.planner.cluster import can_link, parse_cluster
    from shardline.planner.search import check_refusals, check_sizes, engine_for, search

    def on(text: str) -> Any:
        cluster = parse_cluster(text, gpus, args.link, args.inter_node)
        return search(model, cluster, demand, args.goal, args.engine, fixed)

    if args.gpus == "any":
        names = [name for name, gpu in gpus.items() if gpu.price is not None and can_link(gpu, args.link)]
        if not names:
            raise ValueError(f"--link {args.link}: no GPU with a known price has it; leave it out")
        found = _cheapest([_fewest(on, name) for name in names])
    elif re.match(r"\d+x|.*\+", args.gpus, re.IGNORECASE):
        found = on(args.gpus)
    else:
        found = _fewest(on, args.gpus)
    check_sizes(model, found.cluster, args.engine or engine_for(model, found.cluster), fixed)
    check_refusals(found)
    return found


def _cheapest(results: list[Any]) -> Any:
    """The search whose recommendation costs least; the first of all if none recommends a layout."""
    good = [one for one in results if one.recommended is not None]
    return min(good, key=lambda one: one.options[one.recommended].cost_per_million) if good else results[0]


def _fewest(on: Any, name: str) -> Any:
    """The search on the smallest number of GPUs with a layout to recommend; else on the largest."""
    found = None
    for count in _COUNTS:
        found = on(f"{count}x{name}" if count <= _NODE else f"{count // _NODE}x{_NODE}x{name}")
        if found.recommended is not None and found.options[found.recommended].fit.verdict != "tight":
            good = [one for one in found.options if one.fits and one.fit.verdict != "tight" and not one.misses]
            fewest = min(one.layout.num_gpus for one in good)
            return on(f"{fewest}x{name}") if fewest < min(count, _NODE + 1) else found
    return found


def _validate(args: argparse.Namespace, gpus: Mapping[str, Gpu]) -> int:
    from shardline.planner.validate import format_summary, summarize, validate

    summary = summarize(*validate(args.validate, gpus))
    print(json.dumps(summary, indent=1) if args.json else format_summary(summary))
    return 0
