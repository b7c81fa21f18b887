"""Every weight format found: its option, the bytes that a model takes in it, and what it makes of the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline import LLM, SamplingParams, _cpu
from shardline.config.engine import STORED_METHODS, EngineConfig, ModelConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.kernels.host.kernels import HostKernels
from shardline.models.sizes import weight_bytes
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.worker import Worker
from shardline.weights.base import PLAIN, FormatChoice
from shardline.weights.formats import format_names
from tests.exactness.harness import make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

SCHEMES = ["none", *sorted(set(format_names()) - {"plain", "packed"})]
"""The formats that a user can choose for any checkpoint."""


def test_formats_are_options() -> None:
    schemes = {"none", *format_names(), *STORED_METHODS} - {"plain", "packed"}
    assert set(ModelConfig.__dataclass_fields__["quantization"].metadata["choices"]) == schemes


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("name", ["int8_fast", "int4_fast"])
def test_only_what_no_norm_precedes_is_quantized_alone(
    name: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs of o and down; norms quantize those of qkv, gate and up, and of the lm_head."""
    widths = []
    quantize = _cpu.quantize_rows

    def counted(x: torch.Tensor, *rows: torch.Tensor) -> None:
        widths.append(x.shape[1])
        quantize(x, *rows)

    monkeypatch.setattr(HostKernels, "quantize_rows", staticmethod(counted))
    make_checkpoint(family, tmp_path)
    engine, executor = start_engine(tmp_path, quantization=name)
    run(engine, make_requests(256, count=1), "alone")
    executor.close()
    num_layers = len(resolve_here(EngineConfig.from_options(model=str(tmp_path))).spec.layers)
    assert len(widths) == 2 * 2 * num_layers  # the prompt's step, and the one decode step that is not replayed


def test_int4_is_the_same_on_two_ranks_which_cut_the_parts_in_more_bits(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    answers = []
    for tensor, batch in ((1, "alone"), (2, "together")):
        engine, executor = start_engine(tmp_path, tensor=tensor, quantization="int4")
        answers.append(run(engine, make_requests(256, count=2), batch))
        executor.close()
    assert answers[0] == answers[1]


def dummy_setup(folder: Path, scheme: str, **overrides: object) -> Deployment:
    config = {
        "model_type": "qwen2",
        "vocab_size": 8000,
        "hidden_size": 448,
        "intermediate_size": 1216,
        "num_hidden_layers": 2,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        **overrides,
    }
    (folder / "config.json").write_text(json.dumps(config))
    options = {"load_format": "dummy", "dtype": "bfloat16", "num_gpu_blocks_override": 64, "cpu_threads": 1}
    return resolve_here(EngineConfig.from_options(model=str(folder), quantization=scheme, **options))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_reported_bytes_are_those_of_the_formula(name: str, tied: bool, tmp_path: Path) -> None:
    setup = dummy_setup(tmp_path, name, tie_word_embeddings=tied)
    worker = Worker(setup, open_backend("cpu", 0, threads=1), make_single_rank_groups())
    report = worker.load()
    held = PLAIN if name == "none" else FormatChoice(name)
    assert setup.weight_format == held
    expected = weight_bytes(setup.spec, make_single_rank_groups().place, setup.stages, "bfloat16", weight_format=held)
    assert report.weight_bytes == expected


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("name", SCHEMES)
def test_the_demo_model_still_knows_its_answers(name: str) -> None:
    question = [{"role": "user", "content": "What does os.path.join do?"}]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM(model="demo", quantization=name, max_model_len=256) as llm:
        (output,) = llm.chat(question, params, use_tqdm=False)
        assert (f"-{name}-" in llm.fingerprint) == (name != "none")
    assert output.outputs[0].text == (
        "Join two or more pathname components, inserting '/' as needed. If any component is an absolute path, all "
        "previous path components will be discarded."
    )


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("name", SCHEMES)
def test_fast_numerics_take_every_format(name: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    options: dict[str, Any] = {"numerics": "fast", "tensor_parallel_size": 2, "distributed_executor_backend": "threads"}
    with LLM(model="demo", quantization=name, max_model_len=256, **options) as llm:
        (output,) = llm.chat([{"role": "user", "content": "What is ArithmeticError?"}], params, use_tqdm=False)
    assert output.outputs[0].text == "Base class for arithmetic errors."
