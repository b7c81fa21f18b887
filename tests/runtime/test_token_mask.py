"""Which tokens constrained sequences may continue with."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.models.hub import DEMO_FOLDER
from shardline.runtime.sampling.token_mask import ConstraintMaker, TokenMask, collect_masks
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from shardline.structured.grammar import structured_grammar
from shardline.types import Constraints, SequenceStart

VOCAB_SIZE, EOS = 2048, 2
MAKER = ConstraintMaker(VOCAB_SIZE, str(Path(DEMO_FOLDER) / "tokenizer.json"))


def make(output: tuple[int, ...] = (), *, min_tokens: int = 0, **constraints: object) -> TokenMask:
    params = SamplingParams(max_tokens=100, min_tokens=min_tokens, stop_token_ids=[7])
    given = Constraints(**constraints)  # type: ignore[arg-type]
    mask = MAKER.make_mask(SequenceStart(1, [1, 5, *output], 2, params, 0, (EOS,), given))
    assert mask is not None
    return mask


def allowed(mask: TokenMask) -> set[int]:
    words = mask.find_allowed()
    return {token for token in range(VOCAB_SIZE) if words[token >> 5] >> (token & 31) & 1}


def regex(pattern: str) -> str:
    return structured_grammar(StructuredOutputsParams(regex=pattern))


def test_no_constraints_no_mask() -> None:
    assert MAKER.make_mask(SequenceStart(1, [1], 1, SamplingParams(), 0, (EOS,))) is None


def test_allowed_tokens_and_bad_words() -> None:
    assert allowed(make(allowed_token_ids=(3, 40, EOS))) == {3, 40, EOS}
    everything = set(range(VOCAB_SIZE))
    assert allowed(make(bad_words=((9,), (10, 11), (1, 5, 6)))) == everything - {9}
    assert allowed(make((10,), bad_words=((10, 11),))) == everything - {11}
    assert allowed(make((10, 8), bad_words=((10, 11),))) == everything


def test_min_tokens_exclude_the_ends() -> None:
    assert allowed(make(allowed_token_ids=(3, 7, EOS), min_tokens=1)) == {3}
    assert allowed(make((3,), allowed_token_ids=(3, 7, EOS), min_tokens=1)) == {3, 7, EOS}


def test_the_end_is_allowed_where_the_grammar_may_end() -> None:
    mask = make(grammar=regex("(a|b)+"))
    first = allowed(mask)
    assert EOS not in first
    mask.append_token(min(first))
    assert EOS in allowed(mask)
    mask.append_token(EOS)
    assert mask.is_finished


def test_a_restart_has_the_state_of_the_whole_output() -> None:
    mask = make(grammar=regex("(a|b){3}c"))
    output: list[int] = []
    while not mask.is_finished:
        assert allowed(make(tuple(output), grammar=regex("(a|b){3}c"))) == allowed(mask)
        output.append(max(allowed(mask)))
        mask.append_token(output[-1])
    assert make(tuple(output), grammar=regex("(a|b){3}c")).is_finished


def test_an_empty_mask_is_an_error() -> None:
    masks, errors = collect_masks([None, make(allowed_token_ids=(EOS,), min_tokens=3), make(bad_words=((9,),))])
    assert masks is not None
    assert masks.rows.tolist() == [2]
    assert "no token may follow" in errors[1]
    with pytest.raises(ValueError, match="no token"):
        make(grammar=regex("a"), allowed_token_ids=(3,)).find_allowed()
