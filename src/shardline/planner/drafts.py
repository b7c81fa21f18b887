"""What drafts gain, from how often guesses are right."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

from shardline.deployment.deployment import Deployment, DraftPlan
from shardline.models.partition import Span
from shardline.models.parts import DTYPE_BYTES
from shardline.models.step_work import StepWork, step_work
from shardline.models.stored_weights import StoredRules, StoredWeights
from shardline.planner import vllm
from shardline.planner.layout import Layout
from shardline.planner.search import Plan
from shardline.planner.speed import layout_work
from shardline.planner.timing import step_load


@dataclass(frozen=True)
class DraftGain:
    """The drafts that are best for a number of requests at once."""

    running: float
    """Requests in a step."""
    length: int
    """Guesses of a draft; 0: none pay."""
    tokens: float
    """Of a request, in a step."""
    speedup: float
    """How many times as fast requests are as without drafts, their prompts included."""


def draft_gains(plan: Plan, acceptance_rate: float) -> list[DraftGain]:
    """The gain in the best layout of a plan for this host: for one request, and for as many as the load has.

    `acceptance_rate`: how likely a guess is right if those before it were. A step with drafts of k guesses has 1 + k
    rows for each request, and gives it 1 + p + ... + p^k tokens (Leviathan et al., 2023, "Fast inference from
    transformers via speculative decoding"); a draft model or a head runs k times before it.

    Raises:
        ValueError: the rate is none, or nothing is drafted.
    """
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"--acceptance-rate must be from 0 to 1, got {acceptance_rate:g}")
    assert plan.best is not None
    assert plan.best.speed is not None
    layout, deployment = plan.best.layout, plan.best.fit.deployment
    if deployment is None or not deployment.limits.drafts:
        raise ValueError(
            "--acceptance-rate needs --speculative-config, which says how tokens are drafted, and --gpus here"
        )
    work = layout_work(plan.model, layout, plan.best.fit)
    load = max(1.0, plan.best.speed.running / layout.data / layout.pipeline)
    return [_gain(plan, deployment, work, acceptance_rate, running) for running in dict.fromkeys((1.0, load))]


def _gain(plan: Plan, deployment: Deployment, work: StepWork, rate: float, running: float) -> DraftGain:
    assert plan.best is not None
    layout, constants = plan.best.layout, plan.timing[plan.best.layout.engine].constants
    used, input_len, output_len = plan.cluster.part(layout.num_gpus), plan.demand.input_len, plan.demand.output_len
    context = input_len + output_len / 2
    prompts = running * layout.pipeline * step_load(work, used, 0, 0, input_len, input_len / 2).seconds(constants)
    of_pass = 0.0
    if deployment.draft is not None:
        passes = _pass_work(deployment, deployment.draft, work)
        # The host plans nothing for it.
        alone = dataclasses.replace(constants, step=0.0, request=0.0)
        of_pass = step_load(passes, used, running, context, 0, 0).seconds(alone)

    def seconds(length: int) -> float:
        step = step_load(work, used, running, context, 0, 0, guesses=length).seconds(constants)
        return prompts + output_len * (layout.pipeline * step + length * of_pass) / _tokens(rate, length)

    best = min(range(deployment.limits.speculation.num_speculative_tokens + 1), key=seconds)
    return DraftGain(running, best, _tokens(rate, best), seconds(0) / seconds(best))


def _tokens(rate: float, length: int) -> float:
    return float(sum(rate**count for count in range(length + 1)))


def _pass_work(deployment: Deployment, draft: DraftPlan, model: StepWork) -> StepWork:
    """The work of a pass of a draft model or a head, on one of the ranks that share it."""
    work = step_work(
        draft.spec,
        vllm.grid_of(Layout("shardline", tensor=draft.num_sharing)).place(0),
        (Span(0, len(draft.spec.layers)),),
        StoredWeights(StoredRules(), deployment.dtype, lambda name: name),
        deployment.cache.dtype,
        "exact",
    )
    head = draft.spec.head_input
    if head is None or head.own_lm_head:
        return work
    shared = model.head_flops / 2 * DTYPE_BYTES[deployment.dtype]
    return dataclasses.replace(work, dense_bytes=work.dense_bytes + shared, head_flops=model.head_flops)


def format_gains(gains: list[DraftGain], acceptance_rate: float) -> str:
    """A line for each number of requests."""
    lines = [f"drafts: guesses of which each is right with {acceptance_rate:.0%} if those before it were"]
    for gain in gains:
        requests = "1 request" if gain.running == 1 else f"{gain.running:.0f} requests at once"
        words = f"{gain.length} guess{'es' * (gain.length > 1)} and {gain.tokens:.1f} tokens a step"
        lines.append(f"  {requests}: " + (f"{gain.speedup:.2f} x with {words}" if gain.length else "none pay"))
    return "\n".join(lines)


def gains_json(gains: list[DraftGain]) -> list[dict[str, Any]]:
    """The gains as JSON data."""
    return [asdict(gain) for gain in gains]
