"""A plan as a page of text: the recommendation, its memory, the path to it, and the runners-up."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence

from rich.text import Text

from shardline.planner.commands import Command, plan_commands
from shardline.planner.cost import (
    HOURS_PER_DAY,
    SECONDS_PER_HOUR,
    ApiPrice,
    Costs,
    OtherPrices,
    api_break_even,
    recommended_costs,
)
from shardline.planner.hardware import GB, GIB
from shardline.planner.memory import storage_note, weights_note
from shardline.planner.path import explain_path
from shardline.planner.report import axis_traffic, frontier, link_rates, missing_weights, plan_memory
from shardline.planner.search import Option, Plan
from shardline.planner.timing import Interval

_WIDTH, _HEIGHT = 100, 45
"""Columns and lines of a page."""
_SHOWN = 6
"""Layouts of the table, the recommended one included."""
_VERDICTS = {"generous": "green", "comfortable": "green", "tight": "yellow"}
_FEW_MIB = 100
"""Below so many MiB, sizes are shown in MiB."""
_KEPT_BLANK = "\0"
"""Stands for a blank at which a command is not wrapped."""


def format_plan(
    plan: Plan, *, show_all: bool = False, api: ApiPrice | None = None, others: OtherPrices | None = None
) -> str:
    """The page of `plan_page` without colours."""
    return plan_page(plan, show_all=show_all, api=api, others=others).plain


def plan_page(
    plan: Plan, *, show_all: bool = False, api: ApiPrice | None = None, others: OtherPrices | None = None
) -> Text:
    """The plan as a page of at most 100 columns and 45 lines, with colours.

    With `show_all`, every layout is in the table, refused ones with the reason, and each question of the path has its
    figures; then the page is as long as they are.
    """
    shown, lines, end = plan.best or _nearest(plan), _head(plan), list[Text]()
    if plan.best is None:
        lines += [Text(), *_nothing(plan, shown)]
    else:
        commands = plan_commands(plan)
        own = commands.pop(plan.best.layout.engine)
        lines += [Text(), *_recommendation(plan, plan.best, own, api, others or OtherPrices())]
        end = _other_command(plan.best, commands)
    if shown is not None:
        lines += _wrap(missing_weights(plan, shown.fit), "missing: ", "yellow")
        lines += [Text(), *_memory_lines(plan, shown), *_bandwidth_lines(plan, shown)]
    lines += [Text(), *_path_lines(plan, show_all)]
    options = plan.options if show_all else _selection(plan)
    rows = [_row(plan, option, _name_width(options)) for option in options]
    room = _HEIGHT - len(lines) - len(end) - 3  # a blank line, the head of the table, and how many more there are
    while not show_all and sum(map(len, rows)) > room and rows[1:]:
        rows.pop()
    if rows:
        lines += [Text(), _table_head(plan, _name_width(options)), *(line for row in rows for line in row)]
    hidden = len(plan.options) - len(rows)
    if hidden:
        lines += [] if rows else [Text()]
        lines += _wrap(f"{hidden} more layout{'s' * (hidden > 1)}, and the figures of each answer: --all", style="dim")
    return Text("\n").join([*lines, *end])


def _wrap(text: str, label: str = "", style: str = "", *, indent: str = "  ") -> list[Text]:
    """Lines of the page; words, such as those of a command, stay whole. The style is the label's, if there is one."""
    if not text:
        return []
    wrapped = textwrap.wrap(
        label + text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    lines = [Text(line) for line in wrapped]
    if label:
        lines[0].stylize(style or "bold", 0, len(label))
    else:
        for line in lines:
            line.stylize(style)
    return lines


def _head(plan: Plan) -> list[Text]:
    """The model, what it runs on, and why not in this engine."""
    cluster, name = plan.cluster, plan.model.name
    if cluster.host is not None:
        return [*_wrap(f"{name} on this host", style="bold"), *_wrap(cluster.host_summary, "devices: ")]
    nodes = "one node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes, "
    if cluster.num_nodes > 1:
        nodes += f"{cluster.network_bytes_per_second / GB:g} GB/s each way between them"
    link = f"{cluster.link.kind} {cluster.link.gbs:g} GB/s each way"
    if cluster.link.pair_gbs < cluster.link.gbs:
        link += f" ({cluster.link.pair_gbs:g} between two)"
    text = f"{name} on {cluster.name}, {nodes}, {link}, {cluster.smallest.usable_gib:.4g} GiB usable"
    lines = _wrap(text, style="bold")
    if plan.model.engine_refusal:
        lines += _wrap(f"vLLM only: {plan.model.engine_refusal}", style="yellow")
    is_ours = plan.best is not None and plan.best.layout.engine == "shardline"
    for kernel, why in plan.model.by_torch.items() if is_ours else ():
        lines += _wrap(f"torch computes {kernel}, more slowly than planned: {why}", style="yellow")
    return lines + _wrap(plan.instead, style="yellow")


def _recommendation(
    plan: Plan, best: Option, command: Command | None, api: ApiPrice | None, others: OtherPrices
) -> list[Text]:
    """The command, what fits, how fast it is, and what it costs."""
    fitted, used = best.fit, best.layout.num_gpus
    part = "" if plan.cluster.is_shared or used == plan.cluster.num_gpus else f", {used} of the {_gpus(plan)}"
    lines = _wrap(f"{best.layout}{part}", "recommended: ", "bold green")
    if plan.cluster.host is not None:
        lines += _wrap(f"{plan.demand.load_summary}: {best.layout}", "chosen for ")
    lines += _command_lines(command) if command is not None else []
    fewer = "" if fitted.verdict != "tight" else f", fewer than {plan.demand.concurrency}"
    fits = _wrap(
        f"{fitted.requests:,} requests of {fitted.max_model_len:,} tokens at once{fewer} ({fitted.verdict})",
        "fits:  ",
    )
    fits[-1].highlight_words([f"({fitted.verdict})"], _VERDICTS[fitted.verdict])
    lines += [*fits, *_speed_lines(plan, best)]
    costs = recommended_costs(plan, others)
    if costs is not None:
        lines += _wrap(_cost_text(costs), "price: ")
    elif plan.cluster.host is None:
        lines += _wrap(f"not known of {plan.cluster.part(used).name}", "price: ")
    return lines + (_wrap(_api_text(plan, api, others), "an API? ") if api is not None else [])


def _gpus(plan: Plan) -> str:
    return f"{plan.cluster.num_gpus} GPU{'s' * (plan.cluster.num_gpus > 1)}"


def _speed_lines(plan: Plan, option: Option) -> list[Text]:
    speed, demand = option.speed, plan.demand
    assert speed is not None
    running = f"{speed.running:,.0f} request{'s' * (round(speed.running) != 1)}"
    risk = f"; may miss {option.may_miss}" if option.may_miss else ""
    load = f"{running} of {demand.input_len:,} + {demand.output_len:,} tokens"
    return [
        *_wrap(f"{speed.output_tok_s.p50:,.0f} tok/s with {load}; bound by {speed.bound_by}", "speed: "),
        *_wrap(f"       TTFT {_span(speed.ttft, 1, 2)} s, TPOT {_span(speed.tpot, 1e3, 0)} ms{risk}"),
    ]


def _command_lines(command: Command) -> list[Text]:
    """A command for a shell, a flag beside its value, and the note about it."""
    units: list[str] = []
    for word in map(shlex.quote, shlex.split(command.line)):
        if units and units[-1].startswith("-") and not word.startswith("-") and " " not in units[-1]:
            units[-1] += f" {word}"
        else:
            units.append(word)
    text = " ".join(unit.replace(" ", _KEPT_BLANK) for unit in units)
    wrapped = textwrap.wrap(
        text, _WIDTH - 2, initial_indent="  $ ", subsequent_indent="    ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    lines = [Text(line.replace(_KEPT_BLANK, " "), "cyan") for line in wrapped]
    for line in lines[:-1]:
        line.append(" \\")
    return lines + [Text("    ").append(line) for line in _wrap(command.note, style="dim", indent="")]


def _other_command(best: Option, commands: Mapping[str, Command | None]) -> list[Text]:
    """The command of the other engine, if a user can type it."""
    for engine, command in commands.items():
        if command is not None and command.is_complete:
            name = "vLLM" if engine == "vllm" else "Shardline"
            is_same = str(command.layout) == str(best.layout)
            title = f"the same in {name}:" if is_same else f"in {name}, as {command.layout}:"
            return [Text(), Text(title, "bold"), *_command_lines(command)]
    return []


def _nearest(plan: Plan) -> Option | None:
    """If nothing is recommended: the layout that comes nearest to what is asked for, of those with figures."""
    if plan.options and plan.options[0].fits:
        return plan.options[0]
    counted = [option for option in plan.options if option.fit.other_bytes]
    return min(counted, key=lambda option: (-option.fit.max_context, -option.fit.kv_bytes), default=None)


def _nothing(plan: Plan, nearest: Option | None) -> list[Text]:
    """Why nothing is recommended."""
    if nearest is None:
        why = plan.options[0].fit.why_not if plan.options else "there are no layouts"
        return _wrap(why, "nothing is recommended: ", "bold red")
    if not nearest.fits:
        text = f"no layout fits. The nearest, {nearest.layout}: {nearest.fit.why_not}"
        return _wrap(text, "nothing is recommended: ", "bold red")
    text = f"the nearest, {nearest.layout}, misses {nearest.misses}"
    return [*_wrap(text, "nothing is recommended: ", "bold red"), *_speed_lines(plan, nearest)]


def _memory_lines(plan: Plan, option: Option) -> list[Text]:
    """The memory of a GPU line by line, and the longest context."""
    memory, fitted = plan_memory(plan, option), option.fit
    per_token, is_gpu = memory["kv_bytes_per_token"], not plan.cluster.is_shared
    tokens = "" if per_token is None else f"   {fitted.kv_tokens:,} tokens of {per_token / 1e3:,.1f} kB"
    note = f"   --gpu-memory-utilization {plan.demand.utilization:g}" * is_gpu
    has_states = plan.model.spec.keeps_states and option.layout.engine == "shardline"
    rows = (
        ("weights", fitted.weight_bytes, weights_note(fitted)),
        ("step and libraries", fitted.other_bytes, "   and states of requests" * has_states),
        *([("LoRA adapters", lora[0], f"   {lora[1]}")] if (lora := fitted.lora_memory)[0] else []),
        ("KV cache", fitted.kv_bytes, tokens if fitted.kv_bytes >= 0 else "   so much is missing"),
        ("unused", memory["unused_bytes"], note),
    )
    host = memory["host_bytes"]
    aside = f"{_size(host)} for evicted blocks of the KV cache, over all replicas"
    limit = " (all positions of the model)" * (fitted.max_context == plan.model.spec.max_position_embeddings)
    device = "GPU" if is_gpu else "rank"
    when, read = storage_note(fitted, plan.cluster.part(fitted.layout.num_gpus).slowest.storage_gbs)
    return [
        *_wrap(f"with {option.layout}, {memory['gpu_bytes'] / GIB:.1f} GiB:", f"memory of a {device} "),
        *(Text(f"  {name:20}{_size(num_bytes):>12}{note}") for name, num_bytes, note in rows),
        *(_wrap(aside, "host memory set aside: ") if host else ()),
        *_wrap(read, f"{when}: "),
        *_wrap(f"{fitted.max_context:,} tokens{limit}", "longest context: "),
    ]


def _size(num_bytes: int) -> str:
    mib = num_bytes / (1 << 20)
    return f"{mib:.1f} MiB" if abs(mib) < _FEW_MIB else f"{num_bytes / GIB:.1f} GiB"


def _bandwidth_lines(plan: Plan, option: Option) -> list[Text]:
    """For each axis, what a GPU receives, and how long that takes over each link."""
    if option.speed is None:
        return []
    device = "rank" if plan.cluster.is_shared else "GPU"
    head = "".join(f"{name:>14}" for name in link_rates(plan))
    title = f"what a {device} receives along each axis, and ms of a decode step"
    lines = [
        *_wrap(f"{title} (all else takes {1e3 * option.speed.other_seconds:.1f} ms)", "links: "),
        Text(f"  {'axis':8}{'kB a token':>12}{'exchanges':>11}{'MB a step':>11}{head}", "dim"),
    ]
    for traffic in axis_traffic(plan, option):
        cells = "".join(f"{1e3 * seconds:>14.2f}" for seconds in traffic.link_seconds.values())
        lines.append(
            Text(
                f"  {traffic.axis:8}{traffic.bytes_per_token / 1e3:>12,.1f}{traffic.exchanges:>11}"
                f"{traffic.step_bytes / 1e6:>11,.2f}{cells}"
            )
        )
    return lines


def _path_lines(plan: Plan, show_figures: bool) -> list[Text]:
    """One question and its answer a line, and below it the figures."""
    path = explain_path(plan)
    width = max(len(step.question) for step in path) + 2
    lines = []
    for step in path:
        lines += _wrap(step.answer, f"{step.question:{width}}", indent=" " * width)
        lines += _wrap(" " * width + step.figures, style="dim", indent=" " * width) if show_figures else []
    return lines


def _cost_text(costs: Costs) -> str:
    parts = []
    if costs.traffic_gb_per_month:
        price = f" for ${costs.traffic_per_month:,.0f}" if costs.traffic_per_month else ""
        parts.append(f"{costs.traffic_gb_per_month:,.0f} GB between nodes{price}")
    if costs.operations_per_month:
        parts.append(f"${costs.operations_per_month:,.0f} for operations")
    included = f" ({', '.join(parts)} included)" if parts else ""
    given = f"{_dollars(costs.output_per_million)} output, {_dollars(costs.input_per_million)} input"
    full = f"{_dollars(costs.full_output_per_million)} and {_dollars(costs.full_input_per_million)}"
    is_full = math.isclose(costs.output_per_million, costs.full_output_per_million, rel_tol=1e-3)
    return (
        f"${costs.per_hour:.2f} an hour, ${costs.per_month:,.0f} a month{included}; a million tokens: {given}"
        + f" at this load, {full} at full load" * (not is_full)
    )


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.2g}"


def _api_text(plan: Plan, api: ApiPrice, others: OtherPrices) -> str:
    tokens = api_break_even(plan, api, others)
    if tokens is None:
        return "nothing to compare it with"
    most = _tokens_a_day(plan)
    answer = f"GPUs from {tokens / 1e6:,.1f} million tokens a day, an API below"
    if math.isinf(tokens):
        answer = "an API: the traffic between nodes alone costs more"
    elif tokens > most:
        answer = f"an API: the layout makes at most {most / 1e6:,.1f} million tokens a day"
    cached = f", {plan.demand.cached_len} of {plan.demand.input_len} input tokens cached" * (plan.demand.cached_len > 0)
    return f"{api.per_token(plan.demand) * 1e6:.2f} dollars for a million mean tokens{cached}: {answer}"


def _tokens_a_day(plan: Plan) -> float:
    assert plan.best is not None
    speed = plan.best.speed
    assert speed is not None
    share = (plan.demand.input_len + plan.demand.output_len) / plan.demand.output_len
    return speed.output_tok_s.p50 * share * HOURS_PER_DAY * SECONDS_PER_HOUR


def _selection(plan: Plan) -> list[Option]:
    """The recommended layout, those that no other beats, and the next best ones."""
    best = [plan.options[index] for index in frontier(plan.options)]
    following = [option for option in plan.options if option.fits]
    chosen = {id(option): option for option in ([plan.best] if plan.best is not None else []) + best + following}
    return list(chosen.values())[:_SHOWN]


def _name_width(options: Sequence[Option]) -> int:
    return max([len("layout"), *(len(str(option.layout)) for option in options)])


def _table_head(plan: Plan, width: int) -> Text:
    return Text(
        f"{'layout':{width}} {'GPU: GiB':>9} {_length_column(plan)} {'TTFT s':>11} {'TPOT ms':>9} {'tok/s':>7} "
        f"{'$/M out':>7}  bound by",
        "bold",
    )


def _length_column(plan: Plan) -> str:
    length = plan.demand.max_model_len or plan.options[0].fit.max_model_len
    return f"{length:,} reqs"


def _row(plan: Plan, option: Option, width: int) -> list[Text]:
    """A layout of the table, and a line about its flaws."""
    size = _memory(option)
    if option.speed is None:
        return _wrap(f"{option.layout!s:{width}} {size:>9} no: {option.fit.why_not}", style="dim")
    speed, data, column = option.speed, option.layout.data, len(_length_column(plan))
    requests = f"{option.fit.requests}" if data == 1 else f"{data}x{option.fit.requests // data}"
    cost = "-" if option.cost_per_million is None else f"{option.cost_per_million:.2f}"
    row = Text(
        f"{option.layout!s:{width}} {size:>9} {requests:>{column}} {_span(speed.ttft, 1, 2):>11} "
        f"{_span(speed.tpot, 1e3, 0):>9} {speed.output_tok_s.p50:>7.0f} {cost:>7}  {speed.bound_by}",
        "green" if option is plan.best else "",
    )
    flaws = (
        "tight" if option.fit.verdict == "tight" else "",
        f"misses {option.misses}" if option.misses else "",
        f"may miss {option.may_miss}" if option.may_miss else "",
    )
    return [row, *_wrap("; ".join(filter(None, flaws)), "  ", "yellow")]


def _memory(option: Option) -> str:
    """Weights, and the KV cache of a layout whose memory was counted."""
    if not option.fit.weight_bytes:
        return "-"
    cache = f"+{max(0, option.fit.kv_bytes) / GIB:.0f}" if option.fit.other_bytes else ""
    return f"{option.fit.weight_bytes / GIB:.1f}{cache}"


def _span(interval: Interval, factor: float, digits: int) -> str:
    return f"{interval.p10 * factor:.{digits}f}-{interval.p90 * factor:.{digits}f}"
