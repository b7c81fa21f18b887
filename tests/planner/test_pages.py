"""Pages of plans over models and GPUs: none is too long, too wide, or says what another line of it denies."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.cli.main import main
from shardline.planner.catalog import find_model
from shardline.planner.layout import Demand, usual_length
from shardline.planner.page import format_plan
from shardline.planner.planned_model import PlannedModel
from shardline.planner.search import Plan, plan_on

SMALL = ["plan", "demo", "--gpus", "1xL4", "--max-model-len", "512", "--input-len", "64"]


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
        assert "is enough" not in text
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


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-235B-A22B-FP8", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b",
])  # fmt: skip
@pytest.mark.parametrize("gpus", ["1xL4", "8xA100-80GB", "8xH200"])
def test_a_page(model: str, gpus: str) -> None:
    check_page(plan_for(find_model(model), gpus))


def test_a_demand_that_nothing_meets_is_not_called_met() -> None:
    model = find_model("meta-llama/Llama-3.1-8B")
    plan = plan_on("1xH200", model, Demand(8192, tpot=1e-4))
    check_page(plan)
    text = format_plan(plan)
    assert re.search(r"^nothing is recommended: the nearest, .*, misses TPOT 0.1 ms$", text, re.MULTILINE)
    assert re.search(r"^one GPU\? one node\? +one GPU holds it$", text, re.MULTILINE)


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert main(SMALL) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if this were a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(SMALL) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[1;32mrecommended: " in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(SMALL) == 0
    assert capsys.readouterr().out == plain


def test_names_of_this_engine_are_in_no_command_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "plan_demo"
    package.mkdir()
    (package / "model.safetensors").touch()
    shutil.copy(DEMO_FOLDER / "config.json", package)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("demo", "package:plan_demo"):
        assert main(["plan", name, *SMALL[2:]]) == 0
        text = capsys.readouterr().out
        assert f"  $ shardline serve {name} " in text
        assert "vllm serve" not in text
    assert main(["plan", "package:plan_demo", *SMALL[2:], "--engine", "vllm"]) == 0
    text = capsys.readouterr().out
    assert "vllm serve package:" not in text
    assert f"vllm serve {package}" in text.replace("\\\n   ", ""), "the folder means something there"


def test_commands_for_vllm_name_checkpoints_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """int4 is the cheapest; vLLM needs a checkpoint for it, so its command is that of the best layout without one."""
    words = ["meta-llama/Llama-3.1-70B-Instruct", "--gpus", "2xH100-80GB-PCIe", "--rate", "2"]
    assert main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^recommended: int4 .*1 of the 2 GPUs$", text, re.MULTILINE)
    assert re.search(
        r"^in vLLM, as fp8 tp2.*:\n  \$ vllm serve meta-llama/Llama-3.1-70B-Instruct --t", text, re.MULTILINE
    )


@pytest.mark.parametrize("document", ["README.md", "docs/planner.md"])
def test_documents_show_what_is_printed(document: str) -> None:
    text = (Path(__file__).parents[2] / document).read_text(encoding="utf-8")
    name, gpus = "meta-llama/Llama-3.1-70B-Instruct", "4xH100-80GB"
    shown = text.partition(f"$ shardline plan {name} --gpus {gpus}\n")[2].partition("\n```")[0]
    assert "\nfits:  " in shown
    assert shown in format_plan(plan_for(find_model(name), gpus))
