"""The start-up report, and that what ranks hold is what `models.sizes` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes
from shardline.deployment.deployment import KernelFallback, KVAllocation
from shardline.deployment.here import resolve_here
from shardline.engine.executor import make_executor
from shardline.engine.report import check_known_answers, startup_report
from shardline.kernels.host import known_answers
from shardline.messages.worker import RankReport
from shardline.models.sizes import kv_bytes_per_token, stage_bubbles, weight_bytes
from tests.models.checkpoints import make_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"), [("llama", 2, 2), ("deepseek_v3", 3, 2), ("gemma4_text", 2, 3)]
)
def test_ranks_hold_what_the_formulas_say(family: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    # Widths of whole panels: the packed weights' padding is not what is counted here.
    wide: dict[str, Any] = {"vocab_size": 768, "hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 12}
    if family == "llama":
        wide |= {"num_key_value_heads": 4}
    elif family == "gemma4_text":
        wide |= {"num_key_value_heads": 4, "head_dim": 64, "global_head_dim": 192, "moe_intermediate_size": 192,
                 "hidden_size_per_layer_input": 192, "vocab_size_per_layer_input": 768}  # fmt: skip
    else:
        wide |= {"num_key_value_heads": 12, "kv_lora_rank": 320, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
                 "v_head_dim": 64, "moe_intermediate_size": 192}  # fmt: skip
        wide |= {"q_lora_rank": 192} if family == "deepseek_v3" else {}
    model = make_checkpoint(family, tmp_path / family, **wide)
    backend = "uni" if tensor * pipeline == 1 else "threads"
    config = EngineConfig.from_options(
        model=str(model),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        distributed_executor_backend=backend,
        kv_cache_memory="8MiB",
        cpu_threads=1,
    )
    setup = resolve_here(config)
    executor = make_executor(setup)
    try:
        reports = executor.start()
    finally:
        executor.close()
    per_token = []
    for report in reports:
        place = setup.grid.place(report.rank)
        per_token.append(kv_bytes_per_token(setup.spec, place, setup.stages, setup.dtype))
        tokens = executor.allocation.num_blocks * setup.cache.block_size
        if family == "gemma4_text":  # groups of unlike shapes and windows; three layers store nothing
            assert report.kv_bytes == executor.allocation.num_blocks * setup.cache.block_bytes[report.rank]
            assert place.pp_rank < 2 or per_token[-1] == 4 * 2 * (4 // 2 * 64 + 192)
        else:
            assert report.kv_bytes == pytest.approx(per_token[-1] * tokens, rel=0.02)
        weights = weight_bytes(setup.spec, place, setup.stages, setup.dtype)
        assert report.weight_bytes == pytest.approx(weights, rel=0.02)
    if family.startswith("deepseek"):
        # Stored once, however many ranks there are.
        assert sum(per_token) == 4 * len(setup.spec.layers) * (320 + 64)
    text = "\n".join(startup_report(setup, 0, executor.allocation, reports, {"load": 0.1}))
    assert f"KV bytes per token: {sum(per_token):,} (rank 0: {per_token[0]:,}" in text
    answers = {report.known_answer for report in reports}
    assert len(answers) == 1
    assert "" not in answers


def test_a_draft_model_has_a_line_of_its_own(tmp_path: Path) -> None:
    draft = make_checkpoint("qwen3", tmp_path / "draft", num_hidden_layers=2)
    config = EngineConfig.from_options(
        model=str(make_checkpoint("llama", tmp_path / "model")),
        speculative_config={"model": str(draft), "num_speculative_tokens": 3, "quantization": "int8"},
        pipeline_parallel_size=2,
        distributed_executor_backend="threads",
        max_num_seqs=4,
        kv_cache_memory="2MiB",
        cpu_threads=1,
    )
    setup = resolve_here(config)
    executor = make_executor(setup)
    try:
        reports = executor.start()
    finally:
        executor.close()
    assert setup.draft is not None
    blocks, own = executor.allocation.num_blocks, setup.cache.block_bytes
    taken = (blocks + 4) * setup.draft.block_bytes[1]
    assert [report.kv_bytes for report in reports] == [blocks * own[0], blocks * own[1] + taken]
    lines = startup_report(setup, 0, executor.allocation, reports, {})
    weights = format_bytes(setup.draft.weights[1].num_bytes)
    expected = f"qwen3, 2 layers, quantization int8, up to 3 tokens; of the above rank 1: weights {weights}, KV "
    assert any(line.startswith(f"draft model {draft}: ") and expected + format_bytes(taken) in line for line in lines)
    decode, prompts = stage_bubbles(setup.spec, setup.stages)
    bubble = f"pipeline bubble of unequal stages: {decode:.0%} while requests decode, {prompts:.0%} while prompts are"
    assert any(line.startswith(bubble) for line in lines)


def test_replicas_have_their_own_numbers() -> None:
    """Each replica is an engine of its own, unless experts are spread over all of them."""
    setup = resolve_here(EngineConfig.from_options(model="demo", device="cpu", data_parallel_size=2, cpu_threads=1))
    failed = (KernelFallback("attention", "hangs"),)
    report = RankReport(0, "host", 7, "CPU", "avx2", 1, 0, 0, 0.0, fallbacks=failed)
    for engine in range(2):
        lines = startup_report(setup, engine, KVAllocation(9), [report], {})
        assert any(f"dp {engine}, pp 0" in line for line in lines)
        assert "rank 0: torch computes attention: hangs" in lines
        assert "CPU KV cache size: 256 tokens a replica in bfloat16" in lines
        assert "Maximum concurrency for 2,048 tokens per request: 0.12x a replica, 0.25x on all 2" in lines


def test_a_token_lies_in_one_replica_of_those_in_lockstep(tmp_path: Path) -> None:
    model = str(make_checkpoint("mixtral", tmp_path / "mixtral"))
    lines: dict[int, list[str]] = {}
    layouts: list[dict[str, Any]] = [{}, {"data_parallel_size": 2, "enable_expert_parallel": True}]
    for options in layouts:
        setup = resolve_here(EngineConfig.from_options(model=model, device="cpu", cpu_threads=1, **options))
        count = setup.grid.world_size
        ranks = [RankReport(rank, "host", 7, "CPU", "avx2", 1, 0, 0, 0.0) for rank in range(count)]
        lines[count] = startup_report(setup, 0, KVAllocation(9), ranks, {})
    bytes_of = {count: [line for line in lines[count] if line.startswith("KV bytes per token")] for count in lines}
    assert bytes_of[1] == bytes_of[2]


def test_ranks_whose_kernels_give_other_bits_are_named() -> None:
    reports = [
        RankReport(rank, f"host{rank // 2}", 7, "CPU", isa, 1, 0, 0, 0.0, known_answer=answer)
        for rank, (isa, answer) in enumerate([("avx2", "a"), ("avx2", "a"), ("avx2", "b"), ("avx512", "c"), ("", "")])
    ]
    with pytest.raises(RuntimeError, match="the avx2 kernels of rank 2 on host1 give other bits"):
        check_known_answers(reports)
    check_known_answers(reports[:2] + reports[3:])


def test_kernels_that_differ_from_themselves_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["a", "a", "b"])
    monkeypatch.setattr(known_answers, "_feed_forward_digest", lambda: next(digests))
    with pytest.raises(RuntimeError, match="kernels give other bits each time; test the memory"):
        known_answers.known_answer()
