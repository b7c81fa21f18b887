"""`shardline plan MODEL --gpus 4xH100-80GB`: what fits, which layout, how fast, at what price. No GPU is needed."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardline.cli.flags import add_engine_flags, engine_config
from shardline.cli.plan_flags import add_plan_flags, check_flags, given_options, read_demand, read_workload


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
    if args.gpus == "here":
        _plan_here(args)
    else:
        _plan(args)
    return 0


# What few plans ask for is imported only then: a plan takes half a second in all.


def _plan(args: argparse.Namespace) -> None:
    """Plan for GPUs that a user could rent."""
    from shardline.planner.catalog import find_model
    from shardline.planner.cost import OtherPrices, parse_api_price
    from shardline.planner.hardware import known_gpus
    from shardline.planner.options import check_options, in_dtype
    from shardline.planner.report import format_plan, plan_json
    from shardline.planner.search import fixed_choices, plan_on

    api = None if args.api_price is None else parse_api_price(args.api_price)
    others = OtherPrices(args.traffic_price, args.operations_price)
    gpus, options = known_gpus(args.hardware), given_options(args)
    model = find_model(args.model, options.get("revision"))
    check_options(options)
    model = in_dtype(model, options.get("dtype", "auto"))
    workload = read_workload(args)
    demand, fixed = read_demand(args, model, workload.trace if workload else ()), fixed_choices(options, model)
    links = {"link": args.link, "inter_node": args.inter_node}
    plan = plan_on(args.gpus, model, demand, args.goal, args.engine, fixed, known=gpus, **links)
    if args.calibrate is not None:
        from shardline.planner.calibration import calibrated

        plan = calibrated(plan, args.calibrate)
    texts, data, simulation = [format_plan(plan, show_all=args.all, api=api, others=others)], {}, None
    if args.compare:
        from shardline.planner.compare import compare_layouts, comparison_json, format_comparison

        pair = compare_layouts(plan, args.compare)
        texts.append(format_comparison(plan, pair))
        data["comparison"] = comparison_json(plan, pair)
    if workload is not None:
        from shardline.planner.simulation.report import format_simulation, simulation_json
        from shardline.planner.simulation.simulate import simulate_plan

        simulation = simulate_plan(plan, workload)
        texts.append(format_simulation(simulation))
        data["simulation"] = simulation_json(simulation)
    text = "\n".join(texts)
    if args.html is not None:
        from shardline.planner.html import plan_html

        try:
            args.html.write_text(plan_html(plan, text, simulation), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--html {args.html} cannot be written: {error.strerror}") from None
    print(json.dumps(plan_json(plan, api, others) | data, indent=1) if args.json else text)


def _plan_here(args: argparse.Namespace) -> None:
    """Plan for the devices of this host. A CPU is measured.

    Raises:
        ValueError: this engine cannot run the model on it.
    """
    from shardline.planner import auto
    from shardline.planner.catalog import find_model
    from shardline.planner.options import check_nodes

    options = given_options(args)
    model = find_model(args.model, options.get("revision"))
    check_nodes(options)
    workload = read_workload(args)
    load = auto.HostLoad(
        args.running or auto.RUNNING, args.input_len or auto.INPUT_LEN, args.output_len or auto.OUTPUT_LEN
    )
    plan = auto.plan_here(engine_config(args), model, None, frozenset(auto.CHOSEN) & options.keys(), load)
    command = auto.command_here(plan, options)
    lines, data = [*auto.path_here(plan), f"run: {command}"], auto.json_here(plan, command)
    if workload is not None:
        from shardline.planner.simulation.report import format_simulation, simulation_json
        from shardline.planner.simulation.simulate import simulate_plan

        simulation = simulate_plan(plan, workload, read_demand(args, model, workload.trace))
        lines.append(format_simulation(simulation))
        data["simulation"] = simulation_json(simulation)
    print(json.dumps(data, indent=1) if args.json else "\n".join(lines))


def _validate(args: argparse.Namespace) -> None:
    """Print the errors of predictions of a file's rows."""
    from shardline.planner.hardware import known_gpus
    from shardline.planner.validate import format_summary, summarize, validate

    summary = summarize(*validate(args.validate, known_gpus(args.hardware)))
    print(json.dumps(summary, indent=1) if args.json else format_summary(summary))
