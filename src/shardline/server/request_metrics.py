"""Where the time of requests went, as JSON: in answers with `return_metrics`, and of GET /requests/{id}."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shardline.api.outputs import RequestOutput
from shardline.messages.timeline import ChoiceMetrics, RequestMetrics


def metrics_body(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """The metrics of the prompts of one API request as a JSON object. Choices are numbered over all prompts."""
    choices = [choice for prompt in metrics for choice in prompt.choices]
    return {
        "arrival_time": min(prompt.arrival_time for prompt in metrics),
        "choices": [_choice_body(index, choice) for index, choice in enumerate(choices)],
    }


def answer_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The metrics of a finished answer."""
    return metrics_body([output.metrics for output in outputs if output.metrics is not None])


def summary_line(choice: ChoiceMetrics) -> str:
    """A choice's time in one line for people."""
    count, right = choice.num_guesses, choice.num_right_guesses
    guessed = f", {right} of {count} guesses right in {choice.num_guessing_steps} steps" if count else ""
    cached = f", {choice.num_cached_tokens} tokens cached" if choice.num_cached_tokens else ""
    parts = [
        _phase("queued", choice.queued_seconds),
        _phase("prefill", choice.prefill_seconds, f"{len(choice.prefill_chunks)} chunk(s){cached}"),
        _phase("first token after", choice.first_token_seconds),
        _phase("decode", choice.decode_seconds, f"{choice.num_generation_tokens} tokens{guessed}"),
    ]
    if choice.preemptions:
        parts.append(_phase(f"{len(choice.preemptions)} preemption(s)", choice.preempted_seconds))
    return ", ".join(filter(None, parts)) or "queued"


def _phase(name: str, seconds: float | None, remark: str = "") -> str:
    if seconds is None:
        return ""
    return f"{name} {1e3 * seconds:.0f} ms" + (f" ({remark})" if remark else "")


def _choice_body(index: int, choice: ChoiceMetrics) -> dict[str, Any]:
    body = msgspec.structs.asdict(choice)
    body["index"] = index
    for name in ("prefill_chunks", "preemptions"):
        body[name] = [msgspec.structs.asdict(entry) for entry in body[name]]
    body["preempted_seconds"] = choice.preempted_seconds
    body["summary"] = summary_line(choice)
    return body
