"""Marks where the matrix has none: in answers that begin elsewhere, and in answers of a required form."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardline.messages.request import Constraints
from shardline.sampling_params import StructuredOutputsParams
from shardline.structured.grammar import structured_grammar
from tests.exactness.cases import KGW, NO_DRAFTS, SYNTHID, Case
from tests.exactness.harness import golden, make_requests, marked, run, run_case, start_engine
from tests.exactness.test_constraints import VOCAB_SIZE, byte_tokenizer, text_of
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("marks") / "llama")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("mark", [KGW, SYNTHID])
def test_an_answer_goes_on_after_what_another_server_has_sent(model: Path, mark: str) -> None:
    requests = marked(make_requests(VOCAB_SIZE, 6), mark)
    engine, executor = start_engine(model, mark=mark)
    whole = run(engine, requests, "together")
    begun = []
    for request in requests:
        tokens = whole[request.request_id].token_ids
        half, name = tokens[: len(tokens) // 2], f"{request.request_id}-on"
        begun.append(msgspec.structs.replace(request, request_id=name, output_token_ids=half))
    rest = run(engine, begun, "together")
    executor.close()
    for request, asked in zip(requests, begun, strict=True):
        both = asked.output_token_ids + rest[asked.request_id].token_ids
        assert both == whole[request.request_id].token_ids


def test_marked_answers_have_the_form_that_was_asked_for_in_every_layout(model: Path) -> None:
    grammar = structured_grammar(StructuredOutputsParams(regex="[ab]{30}c"))
    requests = [
        msgspec.structs.replace(
            request,
            constraints=Constraints(grammar),
            sampling=msgspec.structs.replace(request.sampling, max_tokens=60, min_tokens=0),
        )
        for request in make_requests(VOCAB_SIZE, 5)
    ]
    plain = golden(model, "float32", "none", "auto", requests)
    asked = marked(requests, SYNTHID)
    expected = golden(model, "float32", "none", "auto", asked, SYNTHID)
    texts = [text_of(answer) for answer in expected.values()]
    assert all(set(text[:30]) <= {"a", "b"} and text[30:] == "c" for text in texts), texts
    assert expected != plain
    rest = ("staggered", "chunked", "warm", "tight", "none", "split-experts", "kv-auto", "one-host", NO_DRAFTS, SYNTHID)
    answers, stats = run_case(model, Case("llama", "float32", 2, 2, 1, *rest), asked, expected)
    assert answers == expected
    assert sum(replica.num_preemptions for replica in stats) > 0
