"""Which tokens constrained sequences may continue with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardline.models.hub import DEMO_FOLDER
from shardline.models.partition import Span
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.runtime.sampling.token_mask import ConstraintMaker, MaskMemory, TokenMask
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
    masks, errors = MAKER.collect_masks([None, make(allowed_token_ids=(EOS,), min_tokens=3), make(bad_words=((9,),))])
    assert masks is not None
    assert masks.rows.tolist() == [2]
    assert "no token may follow" in errors[1]
    with pytest.raises(ValueError, match="no token"):
        make(grammar=regex("a"), allowed_token_ids=(3,)).find_allowed()


def test_masks_are_the_same_from_several_threads() -> None:
    grammar = regex("[0-9]{1,3}(,[0-9]+)*")

    def together(num_threads: int) -> torch.Tensor:
        maker = ConstraintMaker(VOCAB_SIZE, str(Path(DEMO_FOLDER) / "tokenizer.json"), num_threads)
        starts = [SequenceStart(n, [1], 1, SamplingParams(), 0, (EOS,), Constraints(grammar)) for n in range(6)]
        sequences = [maker.make_mask(start) for start in starts]
        for number, mask in enumerate(sequences):
            assert mask is not None
            for _ in range(number):
                mask.append_token(min(allowed(mask)))
        masks, errors = maker.collect_masks([None, *sequences])
        assert masks is not None
        assert not errors
        assert masks.rows.tolist() == [1, 2, 3, 4, 5, 6]
        return masks.bits

    assert torch.equal(together(2), together(1))


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
