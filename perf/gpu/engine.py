"""The engine on a device: the demo model's tokens against the CPU's, and the bars of real shapes with dummy weights."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shardline
from shardline import LLM, SamplingParams
from shardline.deployment.probe import probe_gpus

from .inputs import attempt

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "8B": {**_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "tie_word_embeddings": False},
    "1B": {**_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "135M": {**_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
             "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
}  # fmt: skip
_PROMPTS = ["What is a list?", "def add(a, b):", "Hello", "What does str.find do?", "What is an index error? " * 8]


def same_tokens(on: dict[str, str]) -> dict[str, Any]:
    """Compare greedy tokens of the demo model: with the CPU's in fp32, and single requests with a batch in bf16."""
    params = SamplingParams(max_tokens=48, temperature=0.0)
    tokens = {}
    for name, chosen in (("cpu", {"device": "cpu"}), ("here", on)):
        with LLM("demo", dtype="float32", **chosen) as llm:
            tokens[name] = [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, params, use_tqdm=False)]
    with LLM("demo", dtype="bfloat16", **on) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(_PROMPTS, params, use_tqdm=False)]
        alone = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in _PROMPTS]
    return {
        "ok": tokens["cpu"] == tokens["here"] and together == alone,
        "equal_to_cpu_float32": sum(a == b for a, b in zip(tokens["cpu"], tokens["here"], strict=True)),
        "alone_equal_to_batch_bfloat16": sum(a == b for a, b in zip(alone, together, strict=True)),
        "of": len(_PROMPTS),
    }


@contextmanager
def shape_folder(name: str) -> Iterator[str]:
    """A folder with the configuration of a shape, and the demo model's tokenizer."""
    demo = Path(shardline.__file__).parent / "demo_model"
    with tempfile.TemporaryDirectory() as folder:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / file, folder)
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
        yield folder


def _weight_bytes(name: str) -> int:
    """Bytes that one decode step reads: all weights except an untied embedding."""
    shape: dict[str, Any] = SHAPES[name]
    hidden, head_dim = (
        shape["hidden_size"],
        shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"],
    )
    qkv = (shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * head_dim
    layer = hidden * (qkv + shape["num_attention_heads"] * head_dim + 3 * shape["intermediate_size"])
    return int(2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden))


def decode_bar(llm: LLM, name: str, bar: float, ceilings: dict[str, float]) -> dict[str, Any]:
    """Speed of batch-1 decode as a share of the bound: weight bytes divided by copy bandwidth."""
    count = 200 if name != "135M" else 48
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(100, 164))}
    llm.generate(prompt, params, use_tqdm=False)
    tpots = []
    for _ in range(3):
        _, times = llm.generate_timed(prompt, params)
        tpots.append((times[0].finished - times[0].first_token) / (count - 1))
    share = _weight_bytes(name) / ceilings["copy_bytes_per_s"] / min(tpots)
    return {"tpot_ms": min(tpots) * 1e3, "of_ceiling": share, "bar": bar, "met": share >= bar}


def prefill_bar(llm: LLM, name: str, ceilings: dict[str, float], length: int = 8192) -> dict[str, Any]:
    """Measure a prompt in one step."""
    spent = []
    for turn in range(4):
        prompt = {"prompt_token_ids": [(turn + 7 * i) % 50000 for i in range(length)]}
        _, times = llm.generate_timed(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        spent.append(times[0].first_token - times[0].submitted)
    share = length * _weight_bytes(name) / min(spent) / ceilings["flops"]  # two operations per weight of two bytes
    return {"s": min(spent), "of_ceiling": share, "bar": 0.6, "met": share >= 0.6}


def throughput_bar(llm: LLM, ceilings: dict[str, float], bar: float = 0.55) -> dict[str, Any]:
    """Measure 256 requests of 1,024 in and 128 out, all at once (the bar has 1,000 of them, 256 at a time)."""
    prompts = [{"prompt_token_ids": [(31 * r + 7 * i) % 50000 for i in range(1024)]} for r in range(256)]
    _, times = llm.generate_timed(prompts, SamplingParams(max_tokens=128, temperature=0.0, ignore_eos=True))
    spent = max(t.finished for t in times) - min(t.submitted for t in times)
    rate = 256 * (1024 + 128) / spent
    share = rate * _weight_bytes("8B") / ceilings["flops"]
    return {"tokens_per_s": rate, "of_ceiling": share, "bar": bar, "met": share >= bar}


def memory_used() -> dict[str, Any]:
    """The share of the GPU's memory in use after the largest steps. The measurement at the start must still hold."""
    gpus, _ = probe_gpus()
    total, free = gpus[0].memory_total, gpus[0].memory_free
    share = 1.0 - free / total
    return {"share": share, "asked": 0.9, "ok": 0.85 <= share <= 0.91}


def shape_bars(name: str, ceilings: dict[str, float], on: dict[str, str]) -> dict[str, Any]:
    """Measure the start and the bars of one shape."""
    options: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "enable_prefix_caching": False}
    started = time.perf_counter()
    with shape_folder(name) as folder, LLM(folder, load_format="dummy", **options, **on) as llm:
        ready = time.perf_counter() - started
        result = {"ready": {"s": ready, "bar": 20.0, "met": ready <= 20.0}}
        result["decode"] = attempt(decode_bar, llm, name, 0.85 if name == "8B" else 0.70, ceilings)
        if name == "135M":
            result["prefill 1024"] = attempt(prefill_bar, llm, name, ceilings, 1024)
        if name == "8B":
            result["prefill 8192"] = attempt(prefill_bar, llm, name, ceilings)
            result["throughput"] = attempt(throughput_bar, llm, ceilings)
            result["memory"] = attempt(memory_used)
    return result


def run(ceilings: dict[str, float], on: dict[str, str]) -> dict[str, Any]:
    """Run all bars of the engine, of a small shape on a CPU."""
    shapes = ("135M",) if on["device"] == "cpu" else ("1B", "8B")
    return {name: attempt(shape_bars, name, ceilings, on) for name in shapes}
