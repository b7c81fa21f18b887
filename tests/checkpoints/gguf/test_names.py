"""Names of GGUF files: which file of a folder or repository is meant."""

from __future__ import annotations

import pytest

from shardline.checkpoints.gguf.names import choose_files, quant_of, split_quant


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("sub/Qwen3-0.6B-UD-Q4_K_XL-00001-of-00003.gguf", "UD-Q4_K_XL"),
        ("llama-2-7b.Q5_0.gguf", "Q5_0"),
        ("ggml-model-f16.gguf", "F16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model-IQ4_XS.gguf", "IQ4_XS"),
        ("tiny-00001-of-00002.gguf", "tiny"),
        ("Qwen3-0.6B.gguf", "Qwen3-0.6B"),
    ],
)
def test_the_quant_in_a_name(name: str, quant: str) -> None:
    assert quant_of(name) == quant


def test_the_quant_behind_a_model() -> None:
    assert split_quant("team/model:Q4_K_M") == ("team/model", "Q4_K_M")
    assert split_quant("./folder:Q8_0") == ("./folder", "Q8_0")
    for model in ("team/model", "demo", "a:b/c", ":Q4_0", "model:"):
        assert split_quant(model) == (model, None)


REPOSITORY = [
    "README.md",
    "config.json",
    "mmproj-F16.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "m-UD-Q2_K_XL.gguf",
]


def test_one_of_several_quants() -> None:
    assert choose_files(REPOSITORY, "q4_k_m", "team/m") == ["m-Q4_K_M.gguf"]
    assert choose_files(REPOSITORY, "Q2_K_XL", "team/m") == ["m-UD-Q2_K_XL.gguf"]
    assert choose_files(REPOSITORY, "BF16", "team/m") == REPOSITORY[5:7]
    assert choose_files(REPOSITORY[:4], None, "team/m") == ["m-Q4_K_M.gguf"]


@pytest.mark.parametrize(
    "beside",
    [
        "m-mmproj-Q8_0.gguf",
        "mmproj-Q8_0.gguf",
        "M.MMProj.gguf",
        "imatrix_unsloth.gguf",
        "m.imatrix.gguf",
        "._m-Q8_0.gguf",
    ],
)
def test_files_beside_a_model_are_passed_over(beside: str) -> None:
    names = [beside, f"sub/{beside}", "m-Q8_0.gguf", "model-mmprojx-Q4_0.gguf"]
    assert choose_files(names, "q8_0", "team/m") == ["m-Q8_0.gguf"]
    assert choose_files(names, "q4_0", "team/m") == ["model-mmprojx-Q4_0.gguf"]


@pytest.mark.parametrize(
    ("names", "quant", "says"),
    [
        (REPOSITORY, None, "has several quants: BF16, Q4_K_M, Q8_0, UD-Q2_K_XL; name one, for example team/m:Q4_K_M"),
        (REPOSITORY, "Q4_0", "has no quant Q4_0; it has BF16, Q4_K_M, Q8_0, UD-Q2_K_XL"),
        (REPOSITORY[:3], None, "has no GGUF files with a language model"),
        (["m.Q8_0.gguf.part1of2", "m.Q8_0.gguf.part2of2"], None, r"join the pieces of m\.Q8_0\.gguf first, in order"),
        (["m.Q4_0.gguf", "m.Q8_0.gguf-split-a"], "Q8_0", r"has no quant Q8_0; it has Q4_0; join the pieces of m\.Q8_0"),
        ([*REPOSITORY, "draft-Q8_0.gguf"], "Q8_0", "several files of quant Q8_0: draft-Q8_0.gguf, m-Q8_0.gguf"),
    ],
)
def test_an_open_choice_lists_what_is_there(names: list[str], quant: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_files(names, quant, "team/m")
