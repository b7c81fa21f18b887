"""`shardline plan MODEL --gpus 4xH100-80GB`: what fits, which layout, how fast, at what price. No GPU is needed."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import add_engine_flags, engine_config
from shardline.config.engine import option_names

if TYPE_CHECKING:
    from rich.text import Text

    from shardline.planner.layout import Demand
    from shardline.planner.planned_model import PlannedModel
    from shardline.planner.search import Plan
    from shardline.planner.simulation.workload import SimulatedRequest, Workload


def add_parser(commands: Any) -> None:
    description = "Plan a deployment before anything is rented: memory, layouts, speed and cost, with the reasons."
    parser = commands.add_parser("plan", help="what fits, how fast, at what price", description=description)
    flags = add_plan_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, plan_flags=flags)


def run(args: argparse.Namespace) -> int:
    """Print a plan, or the errors of predictions."""
    check_flags(args)
    if args.validate is not None:
        _validate(args)
        return 0
    if not hasattr(args, "model"):
        raise ValueError(
            "name a model, for example shardline plan meta-llama/Llama-3.1-70B-Instruct --gpus 4xH100-80GB"
        )
    if not args.gpus:
        raise ValueError("--gpus is missing; write for example --gpus 4xH100-80GB, or --gpus any")
    workload = read_workload(args)
    _show(args, _plan_here(args) if args.gpus == "here" else _plan(args, workload), workload)
    return 0


# What few plans ask for is imported only then: a plan takes half a second in all.


def _plan(args: argparse.Namespace, workload: Workload | None) -> Plan:
    """The plan for GPUs that a user could rent."""
    from shardline.planner.catalog import find_model
    from shardline.planner.hardware import known_gpus
    from shardline.planner.options import check_options, in_dtype
    from shardline.planner.search import fixed_choices, plan_on

    gpus, options = known_gpus(args.hardware), given_options(args)
    model = find_model(args.model, options.get("revision"))
    check_options(options)
    model = in_dtype(model, options.get("dtype", "auto"))
    demand, fixed = read_demand(args, model, workload.trace if workload else ()), fixed_choices(options, model)
    links = {"link": args.link, "inter_node": args.inter_node}
    plan = plan_on(args.gpus, model, demand, args.goal, args.engine, fixed, known=gpus, **links)
    if args.calibrate is None:
        return plan
    from shardline.planner.calibration import calibrated

    return calibrated(plan, args.calibrate)


def _plan_here(args: argparse.Namespace) -> Plan:
    """The plan for the devices of this host. A CPU is measured.

    Raises:
        ValueError: this engine cannot run the model on it.
    """
    from shardline.planner import auto
    from shardline.planner.catalog import find_model
    from shardline.planner.options import check_options_here

    options = given_options(args)
    model = find_model(args.model, options.get("revision"))
    check_options_here(options)
    running = auto.RUNNING if args.running is None else args.running
    load = auto.HostLoad(running, args.input_len, args.output_len)
    return auto.plan_here(engine_config(args), model, None, options, load, args.storage_gbs)


def _show(args: argparse.Namespace, plan: Plan, workload: Workload | None) -> None:
    """Print a plan and what else the flags ask for, and write the HTML page."""
    from shardline.planner.cost import OtherPrices, parse_api_price

    api = None if args.api_price is None else parse_api_price(args.api_price)
    others = OtherPrices(args.traffic_price, args.operations_price)
    texts: list[str] = []
    data: dict[str, Any] = {}
    simulation = None
    if args.compare:
        from shardline.planner.compare import compare_layouts, comparison_json, format_comparison

        pair = compare_layouts(plan, args.compare)
        texts.append(format_comparison(plan, pair))
        data["comparison"] = comparison_json(plan, pair)
    if args.acceptance_rate is not None:
        from shardline.planner.drafts import draft_gains, format_gains, gains_json

        gains = draft_gains(plan, args.acceptance_rate)
        texts.append(format_gains(gains, args.acceptance_rate))
        data["drafts"] = gains_json(gains)
    if workload is not None:
        from shardline.planner.simulation.report import format_simulation, simulation_json
        from shardline.planner.simulation.simulate import simulate_plan

        demand = None if plan.demand.config is None else read_demand(args, plan.model, workload.trace)
        simulation = simulate_plan(plan, workload, demand)
        texts.append(format_simulation(simulation))
        data["simulation"] = simulation_json(simulation)
    if args.json:
        from shardline.planner.report import plan_json

        print(json.dumps(plan_json(plan, api, others) | data, indent=1))
    if args.json and args.html is None:
        return
    from shardline.planner.page import plan_page

    page = plan_page(plan, show_all=args.all, api=api, others=others)
    page.append("".join(f"\n\n{text}" for text in texts))
    if args.html is not None:
        from shardline.planner.html import plan_html

        try:
            args.html.write_text(plan_html(plan, page.plain, simulation), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--html {args.html} cannot be written: {error.strerror}") from None
    if not args.json:
        _print(page)


def _print(page: Text) -> None:
    """Print with colours on a terminal, unless NO_COLOR is set."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal and not console.no_color:
        console.print(page, soft_wrap=True)
    else:
        print(page.plain)


def _validate(args: argparse.Namespace) -> None:
    """Print the errors of predictions of a file's rows."""
    from shardline.planner.hardware import known_gpus
    from shardline.planner.validate import format_summary, summarize, validate

    summary = summarize(*validate(args.validate, known_gpus(args.hardware)))
    print(json.dumps(summary, indent=1) if args.json else format_summary(summary))


_SECONDS = {"ms": 1e-3, "s": 1.0}
_OF_SIMULATIONS = ("num_prompts", "trace", "prefix_len", "num_prefixes", "replicas", "report_interval")
_NOT_WITH_TRACE = ("prefix_len", "num_prefixes")
_FOR_HERE = (
    "gpus", "json", "all", "compare", "html", "input_len", "output_len", "running", "simulate", "storage_gbs",
    "acceptance_rate",
)  # fmt: skip
_FOR_SIMULATIONS_HERE = (*_OF_SIMULATIONS, "rate", "ttft", "tpot")
_FOR_VALIDATION = ("validate", "hardware", "json")


def add_plan_flags(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    """Add the flags; returns the default of each, by its name."""
    group = parser.add_argument_group("plan")
    group.add_argument("--gpus", metavar="GPUS", help="4xH100-80GB, 2x8xH100-80GB-SXM5, A100-80GB-PCIe+2xL40S; without "
                       "a count: the fewest that do; any: the cheapest; here: this host's devices")  # fmt: skip
    group.add_argument("--link", metavar="LINK", help="link inside a node: nvlink, bridge, xgmi or pcie")
    group.add_argument("--inter-node", metavar="NET", help="network between nodes, for example ib-400 or eth-100")
    group.add_argument("--hardware", type=Path, metavar="FILE", help="TOML file with further GPUs")
    group.add_argument(
        "--input-len", type=int, metavar="N", help="tokens of a prompt (default: 1024, or as in --trace)"
    )
    group.add_argument(
        "--output-len", type=int, metavar="N", help="tokens of an output (default: 128, or as in --trace)"
    )
    group.add_argument("--rate", type=float, metavar="R", help="requests per second (default: as many as fit)")
    group.add_argument("--running", type=int, metavar="N", help="requests running at once, instead of a rate")
    group.add_argument("--concurrency", type=int, default=4, metavar="N",
                       help="requests of full length that should fit (default: 4)")  # fmt: skip
    group.add_argument("--ttft", metavar="TIME", help="longest time to the first token, for example 1s or 500ms")
    group.add_argument("--tpot", metavar="TIME", help="longest time per output token, for example 60ms")
    group.add_argument("--goal", choices=("cost", "latency", "throughput"), default="cost", help="what to optimize")
    group.add_argument(
        "--engine", choices=("shardline", "vllm"), help="default: this engine where it can run the model"
    )
    group.add_argument("--api-price", metavar="IN,CACHED,OUT", help="a managed API's dollars per million tokens")
    group.add_argument("--traffic-price", type=float, default=0.0, metavar="USD",
                       help="price of a gigabyte between nodes (default: 0)")  # fmt: skip
    group.add_argument("--operations-price", type=float, default=0.0, metavar="USD",
                       help="price of operations a month: people, monitoring, storage (default: 0)")  # fmt: skip
    group.add_argument(
        "--all", action="store_true", help="show every layout, also refused ones, and each answer's figures"
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--compare", nargs=2, metavar="LAYOUT", help="two layouts side by side, for example tp4 pp4")
    group.add_argument("--html", type=Path, metavar="FILE", help="write the plan with plots to one HTML file")
    group.add_argument("--calibrate", type=Path, metavar="FILE",
                       help="a benchmark's result (JSON), or a start-up log, of the layout that the flags name: "
                       "predictions follow it")  # fmt: skip
    group.add_argument("--storage-gbs", type=float, metavar="N",
                       help="GB/s at which weights in --offload-to are read (default: measured)")  # fmt: skip
    group.add_argument("--acceptance-rate", type=float, metavar="P",
                       help="how often a guess is right if those before it were: what the drafts of "
                       "--speculative-config gain")  # fmt: skip
    group.add_argument("--validate", type=Path, metavar="FILE", help="predict the rows of a CSV file, and print errors")
    actions = (*group._group_actions, *_add_simulation_flags(parser)._group_actions)
    return {action.dest: action.default for action in actions}


def _add_simulation_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("simulation")
    group.add_argument("--simulate", action="store_true",
                       help="run a workload through the engine's scheduler on the recommended layout, in virtual time; "
                       "--rate R sends requests at random times")  # fmt: skip
    group.add_argument("--num-prompts", type=int, metavar="N", help="requests (default: 1000; all of a trace)")
    group.add_argument("--trace", type=Path, metavar="FILE",
                       help="JSON lines with arrival (seconds), input_len and output_len")  # fmt: skip
    group.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that prompts share; an API has them cached (default: 0)",
    )
    group.add_argument("--num-prefixes", type=int, default=1, metavar="N", help="different prefixes (default: 1)")
    group.add_argument("--replicas", type=int, metavar="N", help="replicas (default: those of the layout)")
    group.add_argument("--report-interval", metavar="TIME", default="100ms",
                       help="age of the loads that a router sees (default: 100ms)")  # fmt: skip
    return group


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags that would have no effect beside the others.

    Raises:
        ValueError: there is one.
    """
    given = [name for name, default in args.plan_flags.items() if getattr(args, name) != default]

    def refuse(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if name in given:
                raise ValueError(f"--{name.replace('_', '-')} {why}")

    if args.validate is not None:
        others = tuple(name for name in given if name not in _FOR_VALIDATION)
        refuse(others, "has no effect with --validate: the rows of its file say what is predicted")
        return
    if args.gpus == "here":
        counted = (*_FOR_HERE, *_FOR_SIMULATIONS_HERE * args.simulate)
        refuse(
            tuple(name for name in given if name not in counted), "has no effect with --gpus here, a plan for one host"
        )
    if not args.simulate:
        if args.api_price is not None and "prefix_len" in given:
            given.remove("prefix_len")
        refuse(_OF_SIMULATIONS, "needs --simulate")
        if args.rate is not None:
            refuse(("running",), "and --rate are two ways to state the load; leave one out")
        return
    refuse(("running",), "is a load that --simulate does not have; use --rate or --trace")
    if args.trace is not None:
        refuse(_NOT_WITH_TRACE, "has no effect with --trace, which has the requests")
    if hasattr(args, "max_num_waiting"):
        raise ValueError("--max-num-waiting has no effect with --simulate, where every request may wait")


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that the user has set."""
    return {name: getattr(args, name) for name in option_names() if hasattr(args, name)}


def read_demand(args: argparse.Namespace, model: PlannedModel, trace: Sequence[SimulatedRequest]) -> Demand:
    """What the flags and the trace demand.

    Raises:
        ValueError: a number is out of its range.
    """
    from shardline.planner.layout import demand_for

    for name in ("input_len", "output_len", "concurrency", "rate", "running"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above zero, and finite, got {value:g}")
    return demand_for(
        model,
        given_options(args),
        trace,
        input_len=args.input_len,
        output_len=args.output_len,
        cached_len=args.prefix_len,
        rate=args.rate,
        running=args.running,
        concurrency=args.concurrency,
        ttft=read_time("--ttft", args.ttft),
        tpot=read_time("--tpot", args.tpot),
    )


def read_workload(args: argparse.Namespace) -> Workload | None:
    """What --simulate runs; None without it.

    Raises:
        ValueError: the trace is broken, or a number is out of its range.
    """
    from shardline.planner.simulation.workload import Prefixes, Workload, read_trace

    if not args.simulate:
        return None
    config = engine_config(args)
    interval = read_time("--report-interval", args.report_interval)
    assert interval is not None
    workload = Workload(
        rate=args.rate or math.inf,
        num_prompts=Workload.num_prompts if args.num_prompts is None else args.num_prompts,
        prefixes=Prefixes(args.prefix_len, args.num_prefixes),
        seed=config.model.seed,
        prefix_caching=config.cache.enable_prefix_caching,
        replicas=args.replicas,
        policy=config.parallel.router_policy,
        report_seconds=interval,
    )
    return workload if args.trace is None else replace(workload, trace=read_trace(args.trace, args.num_prompts))


def read_time(flag: str, text: str | None) -> float | None:
    """Seconds in "1s" or "60ms"; None for None.

    Raises:
        ValueError: the text is no time.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None or float(match.group(1)) <= 0:
        raise ValueError(f"{flag} {text!r}: write for example 60ms or 1.5s")
    return float(match.group(1)) * _SECONDS[match.group(2)]
