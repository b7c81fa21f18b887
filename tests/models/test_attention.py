"""The tensors of a layer's KV cache."""

from __future__ import annotations

import pytest

from shardline.checkpoints.lookup import decoder_spec
from shardline.models.attention import GQA, Projections, Score
from shardline.models.mla import MLA
from shardline.models.parts import KVDType, KVPart
from tests.models.checkpoints import make_config


def test_fields_of_parts_are_changed_by_their_names() -> None:
    gqa = GQA(8, Projections(4, 32), Score(1.0))
    changed = gqa.changed(num_heads=4, softcap=2.0, window=7, kv_source=1)
    assert (changed.num_heads, changed.score, changed.window, changed.kv_source) == (4, Score(1.0, 2.0), 7, 1)
    assert changed.projections is gqa.projections
    with pytest.raises(TypeError, match="twist"):
        gqa.changed(twist=1)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_no_two_traits_have_a_field_of_one_name(family: str) -> None:
    attention = decoder_spec(make_config(family).to_dict()).layers[0].attention
    names = [field.name for field, _ in attention.all_fields()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_keys_and_values_of_heads(dtype: KVDType) -> None:
    parts = GQA(8, Projections(4, 32), Score(1.0)).kv_parts(2, 5, 16, dtype)
    assert parts[:2] == (KVPart((5, 2, 16, 32), dtype),) * 2
    assert parts[2:] == (() if dtype in ("float32", "bfloat16") else (KVPart((5, 2, 16), "float32"),) * 2)
    assert GQA(8, Projections(4, 32), Score(1.0)).kv_parts(1, 1, 1, "int8")[0].num_bytes == 32


def test_latents_are_one_tensor_or_three() -> None:
    mla = decoder_spec(make_config("deepseek_v2").to_dict()).layers[0].attention
    assert isinstance(mla, MLA)
    assert mla.kv_parts(1, 5, 16, "bfloat16") == (KVPart((5, 16, 24 + 8), "bfloat16"),)
    assert mla.kv_parts(1, 5, 16, "int8") == (
        KVPart((5, 16, 24), "int8"),
        KVPart((5, 16, 8), "bfloat16"),
        KVPart((5, 16), "float32"),
    )
