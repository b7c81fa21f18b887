"""Which tokens constrained sequences may continue with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardline.messages.request import Constraints
from shardline.messages.step import SequenceResult, SequenceStart
from shardline.models.partition import Span
from shardline.runtime.features.constraints import MaskMemory, TokenMask, _refuse, collect_masks
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.sampling_params import SamplingParams

VOCAB_SIZE, EOS = 2048, 2


def make(output: tuple[int, ...] = (), *, min_tokens: int = 0, **constraints: object) -> TokenMask:
    params = SamplingParams(max_tokens=100, min_tokens=min_tokens, stop_token_ids=[7])
    given = Constraints(**constraints)  # type: ignore[arg-type]
    return TokenMask(SequenceStart(1, [1, 5, *output], 2, params, 0, (EOS,), given), given, VOCAB_SIZE)


def allowed(mask: TokenMask) -> set[int]:
    words = mask.find_allowed()
    return {token for token in range(VOCAB_SIZE) if words[token >> 5] >> (token & 31) & 1}


def bits(*token_ids: int) -> bytes:
    """What a grammar allows."""
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.uint32)
    for token_id in token_ids:
        words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
    return words.tobytes()


def test_allowed_tokens_and_bad_words() -> None:
    assert allowed(make(allowed_token_ids=(3, 40, EOS))) == {3, 40, EOS}
    everything = set(range(VOCAB_SIZE))
    assert allowed(make(bad_words=((9,), (10, 11), (1, 5, 6)))) == everything - {9}
    assert allowed(make((10,), bad_words=((10, 11),))) == everything - {11}
    assert allowed(make((10, 8), bad_words=((10, 11),))) == everything


def test_min_tokens_exclude_the_ends() -> None:
    assert allowed(make(allowed_token_ids=(3, 7, EOS), min_tokens=1)) == {3}
    assert allowed(make((3,), allowed_token_ids=(3, 7, EOS), min_tokens=1)) == {3, 7, EOS}


def test_a_grammar_is_one_of_the_constraints() -> None:
    mask = make(bad_words=((9,),))
    mask.set_allowed(bits(3, 9, 11, EOS))
    assert allowed(mask) == {3, 11, EOS}
    mask.set_allowed(bits(4)[:4])  # of a tokenizer with fewer tokens than the model
    assert allowed(mask) == {4}
    mask.set_allowed(bits(4, 1999) + bits(5))  # and of one with more
    assert allowed(mask) == {4, 1999}


def test_guesses_are_as_if_they_were_right() -> None:
    mask = make((10,), bad_words=((8, 9),), min_tokens=3)
    mask.set_allowed(bits(8, 11, EOS) + bits(9, 11, EOS) + bits(9, EOS), 2)
    assert allowed(mask) == {8, 11}
    assert allowed(mask.with_guesses([])) == {8, 11}
    assert allowed(mask.with_guesses([8])) == {11}
    assert allowed(mask.with_guesses([8, 11])) == {9, EOS}
    assert allowed(mask) == {8, 11}


@pytest.mark.parametrize(("num_right", "kept"), [(0, None), (1, [5]), (2, [5, 6]), (3, [5, 6, 7])])
def test_what_comes_before_a_refusal_is_kept(num_right: int, kept: list[int] | None) -> None:
    result = SequenceResult(1, [5, 6, 7], digests=["a", "b", "c"])
    refused = _refuse(result, num_right, "no token may follow")
    if kept is None:
        assert (refused.error, refused.refused) == ("no token may follow", True)
    else:
        assert (refused.token_ids, refused.digests, refused.error) == (kept, ["a", "b", "c"][:num_right], "")


def test_an_empty_mask_is_an_error() -> None:
    masks, errors = collect_masks([None, make(allowed_token_ids=(EOS,), min_tokens=3), make(bad_words=((9,),))])
    assert masks is not None
    assert masks.rows.tolist() == [2]
    assert "no token may follow" in errors[1]
    excluded = make(allowed_token_ids=(3,))
    excluded.set_allowed(bits(4))
    with pytest.raises(ValueError, match="no token"):
        excluded.find_allowed()


@pytest.mark.parametrize("span", [Span(0, 200), Span(0, 70), Span(64, 200), Span(67, 133), Span(190, 200)])
def test_a_rank_has_the_bits_of_its_part_of_the_vocabulary(span: Span) -> None:
    dice = np.random.default_rng(0)
    flags = dice.random((2, 224)) < 0.5
    bits = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    memory = MaskMemory(5, span)
    memory.write(TokenMasks(torch.tensor([0, 1]), torch.from_numpy(~bits)), 2)
    written = memory.write(TokenMasks(torch.tensor([2, 0]), torch.from_numpy(bits)), 4)
    found = np.unpackbits(written.numpy().view(np.uint8), axis=1, bitorder="little")[:, : span.size].astype(bool)
    assert (found[[2, 0]] == flags[:, span.start : span.stop]).all()
    assert found[[1, 3]].all()
