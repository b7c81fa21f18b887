"""What a plan says that drafts gain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.config.engine import EngineConfig
from shardline.planner import auto
from shardline.planner.auto import HostLoad, plan_here
from shardline.planner.cluster import parse_cluster
from shardline.planner.drafts import DraftGain, draft_gains
from shardline.planner.hardware import known_gpus
from tests.models.checkpoints import make_checkpoint

LOOK_UP = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    gpu = parse_cluster("1xL4", known_gpus()).gpus[0]
    monkeypatch.setattr(auto, "measure_host", lambda machine, threads: gpu)
    make_checkpoint("llama", tmp_path / "model")
    return str(tmp_path / "model")


def gains(model: str, rate: float, draft: dict[str, object], running: int = 16) -> list[DraftGain]:
    config = EngineConfig.from_options(model=model, speculative_config=draft)
    alone = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    return draft_gains(plan_here(config, given=alone, load=HostLoad(running, 8, 200)), rate)


def test_the_gain_follows_from_the_formula(model: str) -> None:
    """A tiny model's step takes the host's time, whatever its rows: so drafts gain what they add to its tokens, but for
    the prompt."""
    alone, together = gains(model, 0.8, LOOK_UP)
    assert (alone.running, together.running) == (1.0, 16.0)
    assert alone.length == 5
    assert alone.tokens == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3 + 0.8**4 + 0.8**5)
    assert 0.9 * alone.tokens < alone.speedup < alone.tokens


def test_guesses_that_are_never_right_do_not_pay(model: str) -> None:
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 5}
    for gain in gains(model, 0.0, draft):
        assert (gain.length, gain.tokens, gain.speedup) == (0, 1.0, 1.0)


def test_a_draft_model_costs_its_passes(model: str) -> None:
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 5}
    by_rate = [gains(model, rate, draft)[0].speedup for rate in (0.5, 0.8, 1.0)]
    assert by_rate == sorted(by_rate)
    assert by_rate[-1] < gains(model, 1.0, LOOK_UP)[0].speedup


def test_the_command_prints_gains(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", model, "--gpus", "here", "--speculative-config", json.dumps(LOOK_UP), "--input-len", "8"]
    assert main([*words, "--output-len", "200", "--acceptance-rate", "0.8"]) == 0
    out = capsys.readouterr().out
    assert "drafts: guesses of which each is right with 80% if those before it were" in out
    assert "x with 5 guesses and 3.7 tokens a step" in out
    assert main([*words, "--output-len", "200", "--acceptance-rate", "0", "--json"]) == 0
    assert [gain["length"] for gain in json.loads(capsys.readouterr().out)["drafts"]] == [0, 0]
    assert main([*words, "--acceptance-rate", "1.5"]) == 2
    assert "from 0 to 1, got 1.5" in capsys.readouterr().err
    assert main(["plan", model, "--gpus", "here", "--acceptance-rate", "0.8"]) == 2
    assert "needs --speculative-config" in capsys.readouterr().err
