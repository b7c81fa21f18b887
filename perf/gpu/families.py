"""Experts, latent attention and quantization on the GPU: tokens against the CPU's and against batches, and times."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import shardline
from shardline import LLM, SamplingParams
from shardline.checkpoints.lookup import decoder_spec, family
from shardline.models.parameters import parameters, parse_name

from .engine import decode_bar, shape_folder, throughput_bar
from .inputs import attempt

_SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SHAPE,
    "cohere2": {**_SHAPE, "tie_word_embeddings": True, "sliding_window": 32},
    "mixtral": {**_SHAPE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**_SHAPE, **_EXPERTS, "shared_expert_intermediate_size": 192, "decoder_sparse_step": 1},
    "qwen3_moe": {**_SHAPE, **_EXPERTS, "head_dim": 64, "norm_topk_prob": True},
    "deepseek_v3": {
        **_SHAPE,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 24,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"quantization": "int8_fast"},
    "int4": {"quantization": "int4_fast"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "fp8 KV": {"kv_cache_dtype": "fp8"},
}
PROMPTS = [{"prompt_token_ids": [(17 * r + 5 * i) % 2000 + 3 for i in range(5 + 23 * r)]} for r in range(6)]
_PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@contextmanager
def random_model(model_type: str) -> Iterator[str]:
    """Make a checkpoint of a tiny model. Its weights are so large that every part of the model affects the logits."""
    demo = Path(shardline.__file__).parent / "demo_model"
    config = {**CONFIGS[model_type], "model_type": model_type, "torch_dtype": "float32"}
    spec, rng, tensors = decoder_spec(config), torch.Generator().manual_seed(0), {}
    for name, shape in parameters(spec):
        values = torch.randn(shape, generator=rng)
        if parse_name(name).part.endswith("norm"):
            values = 1.0 + 0.1 * values
        elif len(shape) == 2:
            values *= shape[1] ** -0.5
        tensors[family(model_type).tensor_source(name, spec).key] = values
    with tempfile.TemporaryDirectory() as folder:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, folder)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(tensors, Path(folder) / "model.safetensors")
        yield folder


def tokens_of(model: str, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy tokens of all prompts in one batch, and of each alone."""
    with LLM(model, **options) as llm:
        together = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, _PARAMS, use_tqdm=False)]
        alone = [list(llm.generate(prompt, _PARAMS, use_tqdm=False)[0].outputs[0].token_ids) for prompt in PROMPTS]
    return together, alone


def same_tokens(model: str, device: str, **options: Any) -> dict[str, Any]:
    """Compare the GPU with the CPU in fp32, and single requests with a batch in bf16.

    Tokens of a quantized model may differ from the CPU's: if a norm differs in its last bit, a quantized byte may
    differ too. The CPU has no fp8.
    """
    on_cpu = {name: value for name, value in options.items() if value != "fp8"}
    cpu, _ = tokens_of(model, device="cpu", dtype="float32", **on_cpu)
    gpu, gpu_alone = tokens_of(model, device=device, dtype="float32", **options)
    together, alone = tokens_of(model, device=device, dtype="bfloat16", **options)
    equal = sum(a == b for a, b in zip(cpu, gpu, strict=True))
    is_exact = gpu == gpu_alone and together == alone
    return {
        "ok": is_exact and (bool(options) or equal == len(cpu)),
        "equal_to_cpu_float32": equal,
        "of": len(cpu),
        "alone_equal_to_batch_float32": gpu == gpu_alone,
        "alone_equal_to_batch_bfloat16": together == alone,
    }


def every_same_tokens(device: str) -> dict[str, Any]:
    """`same_tokens` for every family, and for the demo model with every quantization."""
    result = {}
    for model_type in (name for name in CONFIGS if name not in ("llama", "cohere2")):
        with random_model(model_type) as folder:
            result[model_type] = attempt(same_tokens, folder, device)
            if model_type in ("mixtral", "deepseek_v3"):
                result[f"{model_type} int4"] = attempt(partial(same_tokens, folder, device, quantization="int4_fast"))
    for name, options in _OPTIONS.items():
        result[f"demo {name}"] = attempt(partial(same_tokens, "demo", device, **options))
    return result


def precision_bars(ceilings: dict[str, float]) -> dict[str, Any]:
    """8B with quantized dummy weights: decode as a share of the time for bf16's bytes, and throughput."""
    options: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "enable_prefix_caching": False}
    result: dict[str, Any] = {}
    for scheme in ("fp8", "int8_fast"):
        with (
            shape_folder("8B") as folder,
            LLM(folder, device="cuda", load_format="dummy", quantization=scheme, **options) as llm,
        ):
            decode = attempt(decode_bar, llm, "8B", 1.5 * 0.85, ceilings)
            result[scheme] = {"decode": decode, "throughput": attempt(throughput_bar, llm, ceilings, 1.5 * 0.55)}
    return result


def run(ceilings: dict[str, float]) -> dict[str, Any]:
    """Run everything in this module."""
    from . import kernel_times  # it needs a GPU

    return {
        "tokens": attempt(every_same_tokens, "cuda"),
        "quantized": attempt(kernel_times.quantized_times, ceilings),
        "experts": attempt(kernel_times.expert_times, ceilings),
        "latent attention": attempt(kernel_times.mla_times, ceilings),
        "8B": attempt(precision_bars, ceilings),
    }
