"""--check-finite: NaN and Inf are told with layer and rank, never turned into tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.messages.request import Request
from shardline.messages.step import SequenceStep, StepPlan
from shardline.runtime.features.finite import FiniteChecker
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import start_engine
from tests.models.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def damaged(folder: Path, key: str, value: float) -> Path:
    """A llama whose tensor `key` is filled with `value`."""
    make_checkpoint("llama", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[key].fill_(value)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_tensor(value: float, tmp_path: Path) -> None:
    model = damaged(tmp_path, "model.layers.1.mlp.up_proj.weight", value)
    with pytest.raises(ValueError, match=r"layers\.1\.feed_forward\.up\.weight holds NaN or Inf"):
        start_engine(model, check_finite=True)


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ({}, ["layer 2 on rank 0"]),
        ({"tensor": 2}, ["layer 2 on rank 0", "layer 2 on rank 1"]),
        # The stage that computed it logs it; the last one tells the request.
        ({"pipeline": 2, "pipeline_stages": "3,1"}, ["what the previous stage sent on rank 1"]),
    ],
)
def test_an_overflow_ends_the_request_with_its_place(
    layout: dict[str, int], places: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = damaged(tmp_path, "model.layers.2.mlp.down_proj.weight", 3e38)
    engine, executor = start_engine(model, check_finite=True, dtype="float32", **layout)  # type: ignore[arg-type]
    engine.add_request(Request(request_id="r", prompt_token_ids=[5, 6, 7], sampling=GREEDY))
    outputs = []
    while engine.busy:
        outputs += engine.step()
    executor.close()
    assert [(output.finish_reason, output.token_ids) for output in outputs] == [("error", [])]
    assert any(place in outputs[0].error for place in places)
    assert "layer 2 on rank 0" in caplog.text


def test_a_sound_model_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    engine, executor = start_engine(tmp_path, check_finite=True)
    engine.add_request(Request(request_id="r", prompt_token_ids=[5, 6, 7], sampling=GREEDY))
    tokens = []
    while engine.busy:
        for output in engine.step():
            tokens += output.token_ids
            assert output.finish_reason in (None, "length", "stop")
    executor.close()
    assert tokens


def test_the_first_place_of_each_sequence() -> None:
    finite_checker = FiniteChecker(rank=3)
    steps = [
        SequenceStep(seq_id, start, count, [[]], -1, True)
        for seq_id, start, count in ((8, 0, 2), (9, 40, 3), (7, 5, 1))
    ]
    finite_checker.begin_step(6)
    hidden = torch.zeros(6, 4)
    finite_checker.check_tensor("layer 0", hidden)
    hidden[4, 1] = torch.inf
    finite_checker.check_tensor("layer 1", hidden)
    hidden[3:5] = torch.nan
    finite_checker.check_tensor("layer 2", hidden)
    logits = torch.zeros(3, 9)
    logits[0, 8] = logits[1, 0] = torch.nan
    finite_checker.check_tensor("the logits", logits, torch.tensor([1, 4, 5]))
    assert finite_checker.report_step(StepPlan(1, [], steps, [])) == {
        8: "NaN or Inf in the logits on rank 3, at position 1",
        9: "NaN or Inf in layer 1 on rank 3, at position 42",
    }
    finite_checker.begin_step(6)
    finite_checker.check_tensor("layer 0", torch.zeros(6, 4))
    assert finite_checker.report_step(StepPlan(2, [], steps, [])) == {}
