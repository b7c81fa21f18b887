"""The whole runtime (kernels, paged cache, layers) against transformers on the same random checkpoints, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shardline.checkpoints.adapters import read_adapter
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.messages.adapters import LoadAdapter
from shardline.messages.request import AdapterRef
from shardline.messages.step import RankStep, SequenceStart, SequenceStep, StepPlan
from shardline.runtime.machines import open_backend
from shardline.runtime.ops.sampling.mask import TokenMasks
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import Sampled, Sampler, SamplingPlan
from shardline.runtime.worker import Worker
from shardline.sampling_params import SamplingParams
from tests.models.checkpoints import FAMILIES, LIKE_OTHERS, VARIANTS, has_experts, make_checkpoint, make_variant

BLOCK_SIZE = 16


class RecordingSampler(Sampler):
    """Keeps the logits and answers with the greedy token."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def sample_tokens(
        self,
        local_logits: Tensor,
        plan: SamplingPlan,
        inputs: SamplingInput,
        masks: TokenMasks | None = None,
        readers: Sequence[Callable[[Tensor], None]] = (),
        editors: Sequence[Callable[[Tensor], None]] = (),
    ) -> Sampled:
        self.logits.append(local_logits.clone())
        for read in readers:
            read(local_logits)
        return Sampled(local_logits.argmax(1))


def generate(
    model: Path,
    prompt: list[int],
    num_tokens: int,
    chunk: int,
    dtype: str = "float32",
    kernels: str = "auto",
    adapter: Path | None = None,
    **more_options: Any,
) -> tuple[list[int], Tensor]:
    """Greedy tokens and the logits [num_tokens, vocab] they came from; the prompt in chunks, then one by one."""
    # Some rope scalings follow max_model_len here and the current length in transformers: make them one.
    options = {"dtype": dtype, "kernels": kernels, "block_size": BLOCK_SIZE, "max_model_len": len(prompt) + num_tokens}
    options |= {**more_options, "enable_lora": adapter is not None}
    setup = resolve_here(EngineConfig.from_options(model=str(model), **options))
    worker = Worker(setup, open_backend("cpu", 0, threads=1, kernels=setup.kernels), make_single_rank_groups())
    worker.load()
    if adapter is not None:
        digest = read_adapter(adapter, setup.spec, max_rank=16).digest()
        worker.adapter_loader.load(LoadAdapter(2, AdapterRef(digest, str(adapter))))
    recorder = RecordingSampler()
    worker.runner._sampler = recorder
    # A digest takes all logits.
    params = SamplingParams(temperature=0.0, logits_digest=True)
    start = SequenceStart(1, prompt, len(prompt), params, 0, (), adapter=-1 if adapter is None else 2)
    num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
    tables = [
        list(range(1 + group * num_blocks, 1 + (group + 1) * num_blocks)) for group in range(len(setup.cache.groups))
    ]
    tokens: list[int] = []
    position = 0
    while len(tokens) < num_tokens:
        size = min(chunk, len(prompt) - position) if position < len(prompt) else 1
        first = position == 0
        entry = SequenceStep(
            1, position, size, tables if first else [[] for _ in tables], -1, position + size >= len(prompt)
        )
        plan = StepPlan(1, [start] if first else [], [entry], [])
        result = worker.runner.run_step(RankStep(plan, (size,), (plan.num_samples,)))
        position += size
        assert result is not None
        for sampled in result.results:
            tokens += sampled.token_ids
    return tokens, torch.cat(recorder.logits)


def check(model: Path, prompt_len: int, kernels: str = "auto") -> None:
    oracle = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, oracle.config.vocab_size, (prompt_len,), generator=generator).tolist()
    tokens, logits = generate(model, prompt, num_tokens=9, chunk=11, kernels=kernels)
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert tokens == expected.argmax(-1).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, tmp_path: Path) -> None:
    check(make_variant(name, tmp_path / "model"), prompt_len=VARIANTS[name].prompt_len)


_WITHOUT_EXPERTS: dict[str, dict[str, Any]] = {"gemma4_text": {"enable_moe_block": False}}
"""Rounding chooses so many of its experts that either side wins with some seeds; all its other parts are compared."""


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in LIKE_OTHERS])
def test_bfloat16_is_as_close_as_transformers_own(family: str, tmp_path: Path) -> None:
    """Both round at every layer; against float32 arithmetic on the same rounded weights, ours must not be worse.

    Where two experts score nearly alike, rounding decides between them, in either's favour, and such a row is off by
    the difference of two experts: there the typical row is compared.
    """
    model = make_checkpoint(family, tmp_path / "model", dtype="bfloat16", **_WITHOUT_EXPERTS.get(family, {}))

    def oracle(dtype: torch.dtype, tokens: list[int]) -> Tensor:
        network = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        with torch.no_grad():
            logits: Tensor = network(torch.tensor([tokens])).logits
        return logits[0].float()

    prompt = torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens, logits = generate(model, prompt, num_tokens=40, chunk=11, dtype="bfloat16")
    exact = oracle(torch.float32, prompt + tokens)[len(prompt) - 1 : -1]
    rounded = oracle(torch.bfloat16, prompt + tokens)[len(prompt) - 1 : -1]
    ours, theirs = (logits - exact).norm(dim=1), (rounded - exact).norm(dim=1)
    if has_experts(family) and family not in _WITHOUT_EXPERTS:
        assert ours.median() <= 1.25 * theirs.median()
    else:
        assert ours.norm() <= 1.25 * theirs.norm()
