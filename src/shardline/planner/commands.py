"""The command lines that start what a plan recommends."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import NamedTuple

from shardline.planner import vllm
from shardline.planner.catalog import own_folder
from shardline.planner.layout import ENGINES, HOST_AXES, HOST_CHOICES, Layout
from shardline.planner.memory import bits_label, fit
from shardline.planner.options import flag_words, lacking_in_vllm, option_words
from shardline.planner.search import Plan

HEAD = "HEAD"
"""Stands for the address of the first node."""
_TRIED = 12
"""Layouts, the best first, of which one is sought that the other engine accepts."""
_UTILIZATION = 0.9
"""Of both engines, without a flag."""


class Command(NamedTuple):
    """A command line, and what a user has to know about it."""

    line: str
    layout: Layout
    note: str = ""
    """Empty: nothing."""
    is_complete: bool = True
    """Whether a user can type it as it is, but for the address of a node: no checkpoint has to be found first."""


def plan_commands(plan: Plan) -> dict[str, Command | None]:
    """The command of each engine for the best layout that it accepts; None: nothing is recommended, or it has none."""
    commands: dict[str, Command | None] = dict.fromkeys(ENGINES)
    if plan.best is None:
        return commands
    if plan.demand.config is not None:
        return commands | {"shardline": _command_here(plan, plan.best.layout)}
    good = [option.layout for option in plan.options[:_TRIED] if option.fits and not option.misses]
    for engine in commands:
        written = (command for layout in good if (command := _command(plan, layout, engine)) is not None)
        first = next(written, None)
        if first is not None and not first.is_complete and engine != plan.best.layout.engine:
            # The plan's own engine starts what is recommended. Of the other one, a command is best that can be typed.
            first = next((command for command in written if command.is_complete), first)
        commands[engine] = first
    return commands


def _command(plan: Plan, layout: Layout, engine: str) -> Command | None:
    """The command line of an engine, if it accepts the layout."""
    own = replace(layout, engine=engine)
    name = plan.model.name if engine == "shardline" else vllm_name(plan)
    if not name or fit(plan.model, own, plan.cluster, plan.demand).verdict == "no":
        return None
    name, quantization, note = _checkpoint(plan, layout, engine, name)
    is_complete = not note
    words = [engine, "serve", name, *_sizes(layout), "--max-model-len", str(plan.demand.max_model_len)]
    kv = layout.kv if engine != "vllm" else vllm.kv_flag(plan.model.spec, layout)
    words += ["--kv-cache-dtype", kv] if kv != "auto" else []
    words += quantization
    demand = plan.demand
    if demand.utilization != _UTILIZATION or "gpu_memory_utilization" in demand.options:
        words += ["--gpu-memory-utilization", f"{demand.utilization:g}"]
    if demand.max_num_seqs is not None:
        words += ["--max-num-seqs", str(demand.max_num_seqs)]
    if demand.max_num_batched_tokens is not None:
        words += ["--max-num-batched-tokens", str(demand.max_num_batched_tokens)]
    words += option_words(demand.options, engine)
    if engine == "shardline" and "numerics" in demand.options:
        words += ["--numerics", layout.numerics]
    if engine == "vllm":
        lacking = lacking_in_vllm(demand.options)
        note = "; ".join([note] * bool(note) + [f"vLLM has no {flag}" for flag in lacking])
        if layout.pipeline > 1 and "pipeline_stages" in demand.options:
            words.insert(0, f"VLLM_PP_LAYER_PARTITION={demand.options['pipeline_stages']}")
    nodes, node_note = _nodes(plan, layout)
    note = "; ".join(text for text in (note, node_note) if text)
    return Command(shlex.join([*words, *nodes]), own, note, is_complete)


def vllm_name(plan: Plan) -> str:
    """The name of the model for vLLM; empty: there is none.

    The names "demo" and "package:..." are this engine's. A plan for vLLM has their folder instead.
    """
    name = plan.model.name
    folder = own_folder(name)
    if folder is None:
        return name
    return str(folder) if plan.best is not None and plan.best.layout.engine == "vllm" else ""


def _command_here(plan: Plan, layout: Layout) -> Command:
    """The command that starts a layout on this host, with the options that the user has set."""
    given = plan.demand.options
    chosen = {f"{axis}_parallel_size": getattr(layout, axis) for axis in HOST_AXES}
    chosen = {name: size for name, size in chosen.items() if size > 1}
    chosen |= {"enable_expert_parallel": True} if layout.whole_experts else {}
    device = {"device": given["device"]} if "device" in given else {}
    words = flag_words(device | chosen) + flag_words(given, skip=("model", "device", *HOST_CHOICES))
    return Command(shlex.join(["shardline", "serve", plan.model.name, *words]), layout)


def _sizes(layout: Layout) -> list[str]:
    sizes = [(f"--{axis}-parallel-size", str(size)) for axis, size in layout.sizes.items() if size > 1]
    return [word for pair in sizes for word in pair] + ["--enable-expert-parallel"] * layout.whole_experts


def _checkpoint(plan: Plan, layout: Layout, engine: str, name: str) -> tuple[str, list[str], str]:
    """(name of the checkpoint, flag of its quantization, note). vLLM itself quantizes to floats only."""
    own, given = bits_label(plan.model), plan.demand.options.get("quantization")
    if layout.weights == own:
        stated = given is not None and (engine == "shardline" or given != "none")
        return name, ["--quantization", str(given)] if stated else [], ""
    is_dense = layout.weights == "bf16"
    if engine == "shardline":
        return name, ["--quantization", "none" if is_dense else layout.weights], ""
    if is_dense:
        return f"{name}-BF16", [], "a checkpoint that is not quantized: find the name of one"
    kind, bits = layout.weights.rstrip("0123456789"), re.sub(r"\D", "", layout.weights)
    if kind == "fp" and not plan.model.rules.rules:
        return name, ["--quantization", layout.weights], ""
    suffix = {"4": "AWQ", "8": "quantized.w8a8"}[bits] if kind == "int" else layout.weights.upper()
    return f"{name}-{suffix}", [], f"a checkpoint quantized to {bits} bits: find the name of one"


def _nodes(plan: Plan, layout: Layout) -> tuple[list[str], str]:
    """(flags of the first of several nodes, note)."""
    nodes = plan.cluster.part(layout.num_gpus).num_nodes
    if nodes == 1 or "ray" in (
        plan.demand.options.get("distributed_executor_backend"),
        plan.demand.options.get("data_parallel_backend"),
    ):
        return [], ""
    head = plan.demand.options.get("master_addr")
    words = ["--nnodes", str(nodes), "--node-rank", "0", "--master-addr", str(head or HEAD)]
    ask = "" if head else f"{HEAD} is the address of node 0; "
    return words, f"{ask}the other nodes have --node-rank 1{f' to {nodes - 1}' * (nodes > 2)}"
