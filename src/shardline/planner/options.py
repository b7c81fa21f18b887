"""Flags of `shardline serve` that a plan is given: where each counts, where it stands in the commands, what is refused.

Every option of the engine's configuration is in one of the groups below, so a plan ignores none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from shardline.config.fields import parse_bytes
from shardline.models.parts import DType
from shardline.planner.planned_model import PlannedModel

SEARCHED = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "context_parallel_size",
    "decode_context_parallel_size", "enable_expert_parallel", "numerics", "quantization", "kv_cache_dtype",
)  # fmt: skip
"""They fix a part of every layout (`search.Fixed`), and the commands are written from the layout."""

DEMANDED = ("model", "max_model_len", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
"""Fields of the demand, or the model."""

_SAME_IN_VLLM = (
    "revision", "tokenizer", "tokenizer_revision", "skip_tokenizer_init", "download_dir", "generation_config",
    "override_generation_config", "dtype", "load_format", "runner", "seed", "block_size", "enable_prefix_caching",
    "num_gpu_blocks_override", "kv_offloading_size", "max_logprobs", "logprobs_mode", "enable_prompt_embeds",
    "enable_chunked_prefill", "disable_nccl_for_dp_synchronization",
    "distributed_executor_backend", "distributed_timeout_seconds", "master_port", "data_parallel_backend",
)  # fmt: skip
"""Options that vLLM has under the same name."""

_OTHERWISE_IN_VLLM = ("kv_cache_memory", "device", "collectives", "master_addr", "pipeline_stages")
"""The memory has another name. GPUs exchange over NCCL without a flag. The address is written with the nodes, and
stages are an environment variable."""

_ONLY_OURS = (
    "router_policy", "step_timeout", "on_failure", "max_restarts", "cpu_threads", "max_num_waiting", "join_timeout",
    "join_token_file", "kv_offloading_dir", "kv_offloading_dir_size", "watermark_config",
)  # fmt: skip
"""Options without a counterpart in vLLM."""

PASSED = (*_SAME_IN_VLLM, *_OTHERWISE_IN_VLLM, *_ONLY_OURS)
"""They go to `resolve` (`decisive_options`) and into the commands (`option_words`)."""

_NODES = "--gpus says which nodes there are, such as 2x8xH100, and the printed commands have the flags for them"
_CHANGED = "a plan reads config.json as it is; change it in a folder of your own, and plan that"
_MOVES = "experts move on CPUs and with --kernels torch, for which a plan has no figures; give it to serve only"
_ADAPTERS = "the Triton kernels have no adapters yet; --gpus here takes it"
_REFUSED = {
    "hf_token": "set HF_TOKEN, so that no printed command has it",
    "hf_overrides": _CHANGED,
    "rope_scaling": _CHANGED,
    "rope_theta": _CHANGED,
    "nnodes": _NODES,
    "node_rank": _NODES,
    "headless": _NODES,
    "data_parallel_size_local": _NODES,
    "data_parallel_start_rank": _NODES,
    "data_parallel_address": _NODES,
    "data_parallel_rpc_port": _NODES,
    "long_prefill_token_threshold": "a plan has no figures for it; give it to serve only",
    "enable_lora": _ADAPTERS,
    "lora_modules": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "max_cpu_loras": _ADAPTERS,
    "lora_target_modules": _ADAPTERS,
    "fully_sharded_loras": _ADAPTERS,
    "cpu_offload_gb": "on GPUs it needs --kernels torch, of which a plan has no figures; --gpus here takes it on CPUs",
    "offload_to": "on GPUs it needs --kernels torch, of which a plan has no figures; --gpus here takes it on CPUs",
    "enable_eplb": _MOVES,
    "eplb_config": _MOVES,
    "share_suffixes": "the Triton kernels have no drafts yet; --gpus here takes it",
    "kernels": "a plan has no figures for torch's operations; give it to serve only",
    "kv_events_config": "it changes no figure; give it to serve only",
    "check_finite": "it is for finding faults, and how much it slows down is not known; give it to serve only",
    "speculative_config": "the Triton kernels have no drafts yet; --gpus here takes it",
}
"""Options that no plan takes, by the reason."""

_REFUSED_VALUES: dict[str, dict[Any, str]] = {
    "max_model_len": {
        "auto": "a plan needs a number of tokens; 'max_context' in --json is the longest request of each layout"
    },
    "runner": {"pooling": "a plan is for models that generate, and has no figures for embeddings"},
    "enable_chunked_prefill": {
        False: "the figures are of prompts in chunks, and this engine has no others; leave it out"
    },
    "collectives": {"gloo": "on GPUs it is a test mode, whose speed is not known; leave it out"},
}
"""Values that a plan refuses. Booleans are written --no-..."""

_DEVICES = ("auto", "cuda")
_FULL_NAMES = {"half": "float16", "float": "float32"}
_NO_FLOAT32 = "GPUs' rates of products in 32 bits are not known"


def is_option(name: str) -> bool:
    """Whether the name of an engine option is in one of the groups."""
    return name in (*SEARCHED, *DEMANDED, *PASSED, *_REFUSED)


def check_options(given: Mapping[str, Any]) -> None:
    """Refuse flags that a plan can neither count nor hand on. `given` are the options that the user has set.

    Raises:
        ValueError: there is one.
    """
    for name, value in given.items():
        why = _REFUSED.get(name) or _REFUSED_VALUES.get(name, {}).get(value)
        if why:
            text = _flag(name, value) if isinstance(value, bool) else f"{_flag(name, value)} {value}"
            raise ValueError(f"{text}: {why}")
    if given.get("device", "auto") not in _DEVICES:
        raise ValueError(
            f"--device {given['device']}: a plan is for the GPUs of --gpus; --gpus here plans for this host"
        )
    for name in ("context_parallel_size", "decode_context_parallel_size"):
        if given.get(name, 1) > 1:
            raise ValueError(
                f"{_flag(name, given[name])} {given[name]}: engines start it on CPUs only so far; --gpus here takes "
                "it, and --compare shows what it would cost"
            )


def check_options_here(given: Mapping[str, Any]) -> None:
    """Refuse flags that a plan for this host does not take: those about other nodes, and torch's operations.

    Raises:
        ValueError: there is one.
    """
    if given.get("kernels") == "torch":
        raise ValueError(f"{_flag('kernels', 'torch')}: {_REFUSED['kernels']}")
    for name in given:
        if _REFUSED.get(name) is _NODES:
            raise ValueError(f"{_flag(name, True)}: --gpus here is a plan for one host; leave it out")


def flag_words(given: Mapping[str, Any], skip: Collection[str] = ()) -> list[str]:
    """The given options as words of `shardline serve`."""
    words: list[str] = []
    for name, value in given.items():
        if name not in skip:
            words += [_flag(name, value)] if isinstance(value, bool) else [_flag(name, value), str(value)]
    return words


def in_dtype(model: PlannedModel, dtype: str) -> PlannedModel:
    """The model with activations, and weights that are not quantized, in the type of --dtype.

    This engine computes unquantized checkpoints in float16 or float32 in float32, unless another type is asked for.

    Raises:
        ValueError: a plan has no figures for the type.
    """
    dtype, stored = _FULL_NAMES.get(dtype, dtype), model.spec.dtype
    computed: DType
    if dtype == "float32":
        raise ValueError(f"--dtype float32: {_NO_FLOAT32}; use --dtype bfloat16 (float16 for vLLM), or leave it out")
    if dtype == "auto":
        # vLLM halves float32, and so do the figures.
        computed = "float16" if stored == "float32" else stored
        refusal = "" if stored == "bfloat16" or model.rules.rules else (
            f"a checkpoint in {stored} runs in float32 here, and {_NO_FLOAT32}; --dtype bfloat16 plans this engine too"
        )  # fmt: skip
    else:
        computed = cast(DType, dtype)
        refusal = "" if dtype == "bfloat16" else f"dtype {dtype} is not supported; use bfloat16"
    return model.with_dtype(computed, refusal)


def decisive_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that `resolve` looks at. How many cores the host of the GPUs has is not known."""
    return {name: value for name, value in given.items() if name in PASSED and name != "cpu_threads"}


def option_words(given: Mapping[str, Any], engine: str) -> list[str]:
    """The given options as words of an engine's command line, without those that are written from the layout."""
    passed = {name: given[name] for name in PASSED if name in given and name != "master_addr"}
    if engine != "vllm":
        return flag_words(passed)
    shared = {name: value for name, value in passed.items() if name in _SAME_IN_VLLM and value != "auto"}
    if "kv_cache_memory" in passed:
        shared["kv_cache_memory_bytes"] = parse_bytes(passed["kv_cache_memory"])
    return flag_words(shared)


def lacking_in_vllm(given: Mapping[str, Any]) -> list[str]:
    """The given flags without which vLLM's command is written, since it has none like them."""
    names = [name for name in _ONLY_OURS if name in given]
    names += ["numerics"] if given.get("numerics") == "exact" else []
    return [_flag(name, True) for name in names]


def _flag(name: str, value: Any) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")
