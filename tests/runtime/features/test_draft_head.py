"""Heads guess as their papers say, and answers are those without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from shardline.runtime.features.draft_head import DraftHead
from shardline.runtime.machines.host.replay import DecodeReplay
from tests.exactness.harness import make_long_requests, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import (
    PREDICTING,
    Eagle3Reference,
    Reference,
    as_library,
    make_eagle,
    make_eagle3,
    make_predicting,
)
from tests.runtime.features.test_draft_model import Noted, drafting_always, greedy_requests

_CLOSE = 1e-3
"""Of logits in float32: how far rounding may move them."""


def check_guesses(
    reference: Reference | Eagle3Reference,
    model: Path,
    head: Path | None,
    tensor: int = 1,
    pipeline: int = 1,
    most: int = 3,
    context: int = 1,
    size: int | None = None,
    **options: Any,
) -> None:
    """Run requests with drafts of the head, compare the answers with those without, and all guesses with those of plain
    torch."""
    asked: dict[str, object] = {"method": "mtp", "num_speculative_tokens": most}
    if head is not None:
        asked |= {"method": "eagle3" if isinstance(reference, Eagle3Reference) else "eagle", "model": str(head)}
    if size is not None:
        asked["draft_tensor_parallel_size"] = size
    requests, noted = [*make_requests(256, 3), *greedy_requests(output=12)], Noted()
    replays: set[Any] = set()

    def guess(draft: DraftHead, asked: list[object]) -> None:
        replays.add(draft._forward)
        noted.guess(draft, asked)

    if context > 1:  # one request has keys of three splits
        requests += [msgspec.structs.replace(one, request_id="long") for one in make_long_requests(256, (1100,))]
    engine, executor = start_engine(model, **options)
    expected = run(engine, requests, "together")
    executor.close()
    with (
        drafting_always(most),
        patch.object(DraftHead, "_guess", guess),
    ):
        layout: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
        engine, executor = start_engine(model, **layout, speculative_config=asked, **options)
        assert run(engine, requests, "staggered") == expected
        again = run(engine, requests[:3], "staggered")  # prefixes are in the cache
        assert again == {name: expected[name] for name in again}
        assert engine.stats().prefix_hits > 0
        executor.close()
    if "kernels" not in options:  # torch's record nothing
        assert all(isinstance(replay, DecodeReplay) and replay._programs for replay in replays), "no pass was recorded"
    assert len(noted.guesses) > 20
    longest = max(noted.guesses, key=len)
    assert (len(longest) > 1024) == (context > 1)
    some = [*list(noted.guesses.items())[:: max(1, len(noted.guesses) // 12)], (longest, noted.guesses[longest])]
    for text, guesses in some:
        assert max(reference.margins(text, guesses)) < _CLOSE
    assert max(map(len, noted.guesses.values())) == most


@pytest.mark.parametrize(
    ("tensor", "pipeline", "made", "options"),
    [
        (1, 1, {}, {}),
        (2, 2, {"bias": True}, {}),
        (2, 2, {"bias": True}, {"size": 1}),
        (1, 2, {"norms": True}, {"max_num_batched_tokens": 13}),
    ],
)
def test_guesses_of_eagle(
    tensor: int, pipeline: int, made: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle(tmp_path / "head", **made)
    check_guesses(Reference(model, head), model, head, tensor, pipeline, **options)


def test_guesses_where_ranks_share_keys(tmp_path: Path) -> None:
    length: dict[str, Any] = {"max_position_embeddings": 1536}
    model, head = make_checkpoint("llama", tmp_path / "model", **length), make_eagle(tmp_path / "head", **length)
    check_guesses(Reference(model, head), model, head, context=2)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "sources", "tokens", "options"),
    [
        (1, 1, None, None, {}),
        (2, 2, [3, 0, 2], range(1, 256, 3), {"max_num_batched_tokens": 13}),
        (3, 1, [3, 0, 2], range(1, 256, 3), {"size": 1}),
        (1, 4, [1, 0, 1], None, {"max_num_batched_tokens": 13}),  # the second stage reads, and the third does not
    ],
)
def test_guesses_of_eagle_3(
    tensor: int, pipeline: int, sources: list[int] | None, tokens: range | None, options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    named: dict[str, Any] = {} if sources is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": sources}}
    head = make_eagle3(tmp_path / "head", tokens=tokens, **named)
    reference = Eagle3Reference(model, head, sources or (2, 2, 1))
    check_guesses(reference, model, head, tensor, pipeline, **options)


def test_guesses_of_heads_that_the_library_speculators_has_saved(tmp_path: Path) -> None:
    model, plain = make_checkpoint("llama", tmp_path / "model"), make_eagle(tmp_path / "eagle", bias=True)
    check_guesses(Reference(model, plain), model, as_library(plain, tmp_path / "library", "eagle"))


@pytest.mark.parametrize(
    "made",
    [
        {"norm_before_residual": True, "fc_norm": True, "tokens": range(1, 256, 3)},
        {"family": "qwen3", "layers": 2, "norm_before_fc": True, "norm_output": True},
    ],
)
def test_guesses_of_eagle_3_heads_that_the_library_speculators_has_saved(made: dict[str, Any], tmp_path: Path) -> None:
    model, sources = make_checkpoint("llama", tmp_path / "model"), [0, 1, 3]
    plain = make_eagle3(tmp_path / "eagle", eagle_aux_hidden_state_layer_ids=sources, **made)
    head = as_library(plain, tmp_path / "library", "eagle3")
    check_guesses(Eagle3Reference(model, plain, sources), model, head, tensor=2 if "family" in made else 1)


def test_a_head_of_eagle_3_that_names_no_token_of_the_model_is_refused(tmp_path: Path) -> None:
    model, head = make_checkpoint("llama", tmp_path / "model"), make_eagle3(tmp_path / "head", tokens=range(9))
    file = head / "model.safetensors"
    tensors = load_file(file)
    for offset in (-1, 300):
        save_file({**tensors, "d2t": tensors["d2t"] + offset}, file)
        asked = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
        with pytest.raises(ValueError, match="d2t of the draft model names tokens that the model does not have"):
            start_engine(model, speculative_config=asked)


@pytest.mark.parametrize("model_type", PREDICTING)
def test_guesses_of_layers_for_multi_token_prediction(model_type: str, tmp_path: Path) -> None:
    model = make_predicting(model_type, tmp_path)
    check_guesses(Reference(model), model, None, tensor=1 + (model_type == "glm4_moe"))
