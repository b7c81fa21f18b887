"""Pages of plans over models and GPUs: none is too long, too wide, or says what another line of it denies."""

from __future__ import annotations

import re

import pytest

from shardline.planner.catalog import find_model
from shardline.planner.layout import Demand, usual_length
from shardline.planner.page import format_plan
from shardline.planner.planned_model import PlannedModel
from shardline.planner.search import Plan, plan_on

GPUS = tuple(f"{count}x{name}" for name in ("L4", "A100-80GB", "H200") for count in (1, 4, 8))


def plan_for(model: PlannedModel, gpus: str, goal: str = "cost") -> Plan:
    return plan_on(gpus, model, Demand(usual_length(model.spec.max_position_embeddings, 1152)), goal)


def check_page(plan: Plan) -> None:
    """See that the page of a plan is a page, and that its lines agree."""
    text = format_plan(plan)
    lines = text.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert not re.search(r"\bcp\d|\bnan\b|\binf\b|\bNone\b|package:", text)
    assert "vllm serve demo" not in text
    labels = ("recommended: " if plan.best else "nothing is recommended: ", "\none GPU? one node? ")
    assert all(text.count(label) == 1 for label in labels)
    path = text.partition("\none GPU? one node? ")[2].partition("\n\n")[0]
    # One question a line.
    assert all(re.match(r"[\w ?]*\?  +\S", line) for line in path.splitlines()[1:])
    sizes = [float(size) for size in re.findall(r"^  (?:weights|step and|KV cache|unused).* ([\d.-]+) GiB", text, re.M)]
    whole = re.search(r"^memory of a GPU with .*, ([\d.]+) GiB:$", text, re.MULTILINE)
    if whole is not None and len(sizes) == 4:
        assert sum(sizes) == pytest.approx(float(whole[1]), abs=0.25)
    if plan.best is None:
        assert " serve " not in text
        assert "is enough" not in text or "misses" in text
        assert re.search(r"^(nothing is recommended|what then\?)", text, re.MULTILINE)
        return
    best = plan.best
    assert best.fits
    command = re.search(rf"^  \$ {best.layout.engine} serve ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert command is not None
    given = dict(re.findall(r"--(\w+)-parallel-size (\d+)", command[1]))
    assert {axis: int(size) for axis, size in given.items()} == {
        axis: size for axis, size in best.layout.sizes.items() if size > 1
    }
    assert text.count(" serve ") == text.count("\n  $ ") <= 2
    ranks = best.layout.num_gpus
    assert "one GPU is enough" not in text or ranks == 1
    if least := re.search(r"^one GPU\? one node\? +(\d+) GPUs? (?:at least|for fewer)", text, re.MULTILINE):
        assert ranks == int(least[1])
    if more := re.search(r"^one GPU\? one node\? +(\d+) GPUs: \S+ fits (\d+), but", text, re.MULTILINE):
        assert int(more[2]) < ranks == int(more[1])
    assert best.fit.max_context >= plan.demand.max_model_len
    assert best.fit.requests >= 1
    if heads := re.search(r"^do the heads divide\? +tensor parallel ([\d, ]+)(.*)", text, re.MULTILINE):
        assert best.layout.tensor in map(int, heads[1].split(",")) or "unevenly" in heads[2]
    assert f"\n{best.layout} " in text.partition("\nlayout ")[2], "the recommended one is in the table"
    assert "does not fit" not in path or best.layout.weights not in re.findall(r"; (\w+) does not fit", path)


@pytest.mark.parametrize("model", [
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b",
])  # fmt: skip
@pytest.mark.parametrize("gpus", ["1xL4", "8xA100-80GB", "8xH200"])
def test_a_page(model: str, gpus: str) -> None:
    check_page(plan_for(find_model(model), gpus))
