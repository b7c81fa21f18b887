"""What the flags of `shardline plan` demand of a deployment, and what they fix."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from shardline.cli.flags import engine_config
from shardline.cli.plan_flags import read_time
from shardline.config.engine import option_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardline.checkpoints.planning import PlannedModel
    from shardline.planner.layout import Demand
    from shardline.planner.search import Fixed
    from shardline.planner.simulation.workload import SimulatedRequest

_INPUT_LEN, _OUTPUT_LEN = 1024, 128
_DEFAULT_LENGTH = 8192


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options that the user has set."""
    return {name: getattr(args, name) for name in option_names() if hasattr(args, name)}


def demanded(args: argparse.Namespace, model: PlannedModel, trace: Sequence[SimulatedRequest]) -> Demand:
    """What the flags demand. Without --max-model-len, requests have up to 8,192 tokens, or as many as stated.

    What the flags leave out is taken from the `trace`, if there is one: the mean lengths, the mean rate, and the
    longest request.

    Raises:
        ValueError: a number is out of its range.
    """
    from shardline.deployment.length import check_length
    from shardline.planner.layout import Demand

    config = engine_config(args)
    for name in ("input_len", "output_len", "concurrency", "rate", "running"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above zero, and finite, got {value:g}")
    input_len, output_len = args.input_len or _INPUT_LEN, args.output_len or _OUTPUT_LEN
    rate, longest = args.rate, 0
    if trace:
        input_len = args.input_len or math.ceil(sum(one.input_len for one in trace) / len(trace))
        output_len = args.output_len or math.ceil(sum(one.output_len for one in trace) / len(trace))
        seconds = trace[-1].arrival - trace[0].arrival
        rate = rate or ((len(trace) - 1) / seconds if seconds else None)
        longest = max(one.input_len + one.output_len for one in trace)
    if not 0 <= args.prefix_len <= input_len:
        raise ValueError(f"--prefix-len {args.prefix_len} must be from 0 to --input-len {input_len}")
    needed = input_len + output_len
    asked, most = config.model.max_model_len, model.spec.max_position_embeddings
    check_length(asked, model.spec)
    length = asked if isinstance(asked, int) else min(most, max(needed, longest, _DEFAULT_LENGTH))
    if needed > length:
        raise ValueError(f"--input-len and --output-len make {needed} tokens, more than --max-model-len {length}")
    return Demand(
        max_model_len=length,
        input_len=input_len,
        output_len=output_len,
        concurrency=args.concurrency,
        rate=rate,
        running=args.running,
        ttft=read_time("--ttft", args.ttft),
        tpot=read_time("--tpot", args.tpot),
        cached_len=args.prefix_len,
        utilization=config.cache.gpu_memory_utilization,
        max_num_seqs=getattr(args, "max_num_seqs", None),
        max_num_batched_tokens=getattr(args, "max_num_batched_tokens", None),
        options=given_options(args),
    )


def fixed_choices(args: argparse.Namespace, model: PlannedModel) -> Fixed:
    from shardline.planner.memory import bits_label
    from shardline.planner.search import Fixed

    quantization = getattr(args, "quantization", None)
    is_stated = model.rules.method and quantization in (model.rules.method, model.rules.method.replace("-", "_"))
    if is_stated or (quantization == "none" and not model.rules.rules):
        quantization = bits_label(model)
    return Fixed(
        tensor=getattr(args, "tensor_parallel_size", None),
        pipeline=getattr(args, "pipeline_parallel_size", None),
        data=getattr(args, "data_parallel_size", None),
        whole_experts=getattr(args, "enable_expert_parallel", None),
        weights="bf16" if quantization == "none" else quantization,
        kv=getattr(args, "kv_cache_dtype", None),
        context=getattr(args, "context_parallel_size", None),
        numerics=getattr(args, "numerics", None),
    )
