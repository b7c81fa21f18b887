"""A draft model guesses its own greedy continuation, and answers are those without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.engine.speculative.payoff import Acceptance, Gate
from shardline.messages.request import Request
from shardline.messages.stats import DraftStats
from shardline.runtime.features.draft_model import DraftModel, Part
from shardline.runtime.machines.host.replay import DecodeReplay
from shardline.sampling_params import SamplingParams
from tests.exactness.harness import BLOCK_SIZE, drafts_allowed, make_long_requests, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

LENGTH = 40
MOST = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def greedy_requests(lengths: tuple[int, ...] = (5, 31, 16, 48), output: int = LENGTH) -> list[Request]:
    """Prompts that end before, at and behind the ends of blocks, two of which begin alike."""
    rng = np.random.default_rng(1)
    shared = rng.integers(4, 256, 200).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return [
        Request(
            request_id=f"greedy {index}",
            prompt_token_ids=shared[:length] if index % 2 else shared[-length:],
            sampling=sampling,
        )
        for index, length in enumerate(lengths)
    ]


def draft_with(model: Path, most: int = MOST) -> dict[str, object]:
    return {"model": str(model), "num_speculative_tokens": most}


@contextmanager
def drafting_always(most: int) -> Iterator[None]:
    """Have drafts of this length, whatever steps take and whatever was wrong."""
    with drafts_allowed(), patch.object(Acceptance, "best_length", lambda *_: most):
        yield


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_the_model_itself_guesses_every_token(tensor: int, pipeline: int, llama: Path) -> None:
    """Each step but the first one, and the last, has as many tokens as a draft and one."""
    requests = greedy_requests((9,))
    engine, executor = start_engine(llama)
    expected = run(engine, requests, "alone")
    executor.close()
    with drafting_always(MOST):
        engine, executor = start_engine(llama, tensor=tensor, pipeline=pipeline, speculative_config=draft_with(llama))
        assert run(engine, requests, "alone") == expected
        stats = engine.stats()
        executor.close()
    drafts = stats.drafts
    assert isinstance(drafts, DraftStats)
    assert drafts.num_accepted == drafts.num_tokens == LENGTH - stats.num_steps
    # The prefill, and as many steps as have 5 tokens each.
    assert stats.num_steps == 1 + -(-(LENGTH - 1) // (1 + MOST))


@pytest.mark.parametrize(("tensor", "pipeline", "context"), [(2, 2, 1), (1, 1, 2)])
def test_one_rank_guesses_what_all_would(tensor: int, pipeline: int, context: int, tmp_path: Path) -> None:
    """The answers are those without drafts, and as many guesses are right as if the ranks shared the draft model."""
    llama = make_checkpoint("llama", tmp_path, max_position_embeddings=1024)
    requests = [*make_requests(256, 4), *greedy_requests((9,), 12)]
    if context > 1:  # keys of two splits
        requests += [msgspec.structs.replace(one, request_id="long") for one in make_long_requests(256, (520,))]
    engine, executor = start_engine(llama)
    expected = run(engine, requests, "together")
    executor.close()
    counts = []
    for size in (1, None):
        drafting: set[int] = set()
        guess = DraftModel._guess

        def note(model: DraftModel, asked: Any, drafting: set[int] = drafting, guess: Any = guess) -> None:
            drafting.add(id(model))
            guess(model, asked)

        asked = {**draft_with(llama), "draft_tensor_parallel_size": size}
        with drafting_always(MOST), patch.object(DraftModel, "_guess", note):
            layout: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
            engine, executor = start_engine(llama, **layout, speculative_config=asked)
            assert run(engine, requests, "together") == expected
            counts.append(engine.stats().drafts)
            executor.close()
        assert len(drafting) == (1 if size else tensor * context)
    assert counts[0] == counts[1]
    assert counts[0] is not None
    assert 0 < counts[0].num_accepted < counts[0].num_tokens


class Noted:
    """What the draft model has guessed: texts and the guesses behind them."""

    def __init__(self) -> None:
        self.guesses: dict[tuple[int, ...], list[int]] = {}
        self.num_partial = 0
        self._guess = DraftModel._guess

    def guess(self, model: DraftModel, asked: list[object]) -> None:
        self._guess(model, asked)  # type: ignore[arg-type]
        for one in asked:
            text = tuple(one.sequence.tokens[: one.num_tokens].tolist())  # type: ignore[attr-defined]
            self.num_partial += not one.guesses  # type: ignore[attr-defined]
            if one.guesses:  # type: ignore[attr-defined]
                self.guesses[text] = list(one.guesses)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "most", "options"),
    [
        ("gemma2", 1, 1, 3, {}),  # windows, a softcap
        ("llama", 1, 1, 20, {}),  # further than a block
        ("qwen3_moe", 2, 1, 5, {"max_num_batched_tokens": 40, "max_num_seqs": 8}),  # prompts are computed in parts
        ("deepseek_v3", 1, 1, 2, {"kv_cache_dtype": "int8"}),
    ],
)
def test_guesses_are_the_greedy_continuation_of_the_draft_model(
    family: str, tensor: int, pipeline: int, most: int, options: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    draft = make_checkpoint(family, tmp_path, seed=5)
    requests, noted = [*make_requests(256, 3), *greedy_requests(output=12)], Noted()
    with (
        drafting_always(most),
        patch.object(DraftModel, "_guess", lambda model, asked: noted.guess(model, asked)),
    ):
        engine, executor = start_engine(
            llama, tensor=tensor, pipeline=pipeline, speculative_config=draft_with(draft, most), **options
        )
        run(engine, requests, "staggered")
        run(engine, requests[:3], "staggered")  # prefixes are in the cache
        assert engine.stats().prefix_hits > 0
        executor.close()
    assert (noted.num_partial > 0) == ("max_num_batched_tokens" in options)
    assert len(noted.guesses) > 20
    texts = list(noted.guesses)[:: max(1, len(noted.guesses) // 24)]
    alone = [
        Request(
            request_id=str(number),
            prompt_token_ids=list(text),
            sampling=SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
        )
        for number, text in enumerate(texts)
    ]
    cache = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    engine, executor = start_engine(draft, enable_prefix_caching=False, **cache)
    answers = run(engine, alone, "together")
    executor.close()
    for number, text in enumerate(texts):
        guesses = noted.guesses[text]
        assert guesses == answers[str(number)].token_ids[: len(guesses)]
    assert max(map(len, noted.guesses.values())) == most


def test_what_a_sequence_finds_in_its_blocks_is_computed_once(llama: Path) -> None:
    """A prompt that is in the prefix cache, and right guesses, cost no further rows; other content does."""
    rows: list[int] = []
    run_parts = DraftModel._run

    def counted(model: DraftModel, parts: list[Part]) -> list[int]:
        rows.append(sum(part.length for part in parts))
        return run_parts(model, parts)

    (request,) = greedy_requests((71,), output=24)
    other = msgspec.structs.replace(request, prompt_token_ids=[7, *request.prompt_token_ids[1:]])
    with drafting_always(MOST), patch.object(DraftModel, "_run", counted):
        engine, executor = start_engine(
            llama, speculative_config=draft_with(llama), num_gpu_blocks_override=12, max_model_len=128
        )
        found = []
        for one in (request, request, other, request):
            rows.clear()
            run(engine, [one], "alone")
            found.append(rows[0])
            assert max(rows[1:]) <= 1 + MOST
        executor.close()
    # Guesses come with a prompt if little of it is new, and else with the step after it.
    whole, rest = 71 + 2, 71 + 1 - (71 - 1) // BLOCK_SIZE * BLOCK_SIZE
    # The third takes blocks of the first, whose content is the draft model's no longer.
    assert found[:3] == [whole, rest, whole]
    assert found[3] in (whole, rest)


@pytest.mark.parametrize(
    ("method", "model", "least"), [("draft_model", "demo-draft", 0.9), ("eagle", "demo-eagle", 0.75)]
)
def test_what_drafts_for_the_demo_model_guesses_its_answers(method: str, model: str, least: float) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    lines = (DEMO_FOLDER / "conversations.jsonl").read_text().splitlines()[:8]
    texts = [f"<|begin|><|user|>{json.loads(line)['question']}<|end|><|assistant|>" for line in lines]
    sampling, end, assistant = SamplingParams(temperature=0.0, max_tokens=64), 2, 4
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=tokenizer.encode(text, add_special_tokens=False).ids,
            sampling=sampling,
            eos_token_ids=(end,),
        )
        for number, text in enumerate(texts)
    ]
    noted = Noted()
    with drafting_always(MOST), patch.object(DraftModel, "_guess", lambda model, asked: noted.guess(model, asked)):
        speculation = {**draft_with(Path(model)), "method": method}
        engine, executor = start_engine(Path("demo"), speculative_config=speculation)
        answers = run(engine, requests, "together")
        drafts = engine.stats().drafts
        executor.close()
    known = [tokenizer.encode(json.loads(line)["answer"], add_special_tokens=False).ids for line in lines]
    assert [answers[str(number)].token_ids[:-1] for number in range(len(lines))] == known
    assert drafts is not None
    assert drafts.num_accepted > least * drafts.num_tokens
    # Nothing is guessed behind the end of an answer, be it certain or a guess.
    assert not any(end in text[text.index(assistant) :] for text in noted.guesses)
    assert any(guesses[-1] == end for guesses in noted.guesses.values())
    assert not any(end in guesses[:-1] for guesses in noted.guesses.values())


def test_passes_are_replayed(llama: Path) -> None:
    replayed = 0
    call = DecodeReplay.__call__

    def counted(replay: DecodeReplay, step: object, hidden: object) -> object:
        nonlocal replayed
        before = len(replay._programs)
        output = call(replay, step, hidden)  # type: ignore[arg-type]
        replayed += step.is_replayable and len(replay._programs) == before  # type: ignore[attr-defined]
        return output

    requests = greedy_requests((9,))
    with drafting_always(MOST), patch.object(DecodeReplay, "__call__", counted):
        engine, executor = start_engine(llama, speculative_config=draft_with(llama))
        run(engine, requests, "alone")
        executor.close()
    # Each of nine steps has four passes; each model records each shape once.
    assert replayed >= 30


def test_nothing_is_computed_while_nothing_is_drafted(llama: Path) -> None:
    with patch.object(Gate, "is_open", False), patch.object(DraftModel, "_run", side_effect=AssertionError):
        engine, executor = start_engine(llama, speculative_config=draft_with(llama))
        run(engine, greedy_requests(), "together")
        executor.close()
