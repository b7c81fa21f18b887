"""What the user asked for, as frozen dataclasses. CLI flags and LLM(...) keywords come from their fields.

`deployment.resolve` decides whatever is "auto" or None here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardline.config.cluster import ClusterConfig
from shardline.config.fields import json_object, option, parse_bytes, parse_count
from shardline.config.kv_events import KVEventsConfig, parse_kv_events
from shardline.config.lora import MOST_RANK, LoRAConfig
from shardline.config.parallel import ParallelConfig, check_parallel, divide_tensor_ranks
from shardline.config.speculation import NO_SPECULATION, Speculation, parse_speculation
from shardline.config.vllm import take_keywords
from shardline.config.watermark import WatermarkConfig, parse_watermark
from shardline.weights.formats import format_names

logger = logging.getLogger(__name__)

_MOST_GIB = float(1 << 30)
_MOST_SEQUENCES, _MOST_ADAPTERS = 1 << 16, 1 << 14
_SIZES = ("kv_cache_memory", "kv_offloading_size", "kv_offloading_dir_size")
"""Options that are no counts."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
STORED_METHODS = (
    "auto-round",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "gguf",
    "gptq",
    "modelopt",
    "mxfp4",
)
"""Ways in which a checkpoint may be quantized (the `quant_method` of its config.json), and the engine does not quantize
itself."""


@dataclass(frozen=True)
class HubAccess:
    """How the hub is asked for models, and where its files go.

    None: as huggingface_hub does by itself, with HF_TOKEN and HF_HUB_CACHE.
    """

    token: str | None = field(default=None, repr=False)
    folder: str | None = None
    """The cache of downloaded files."""


USUAL_ACCESS = HubAccess()


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its weights are read."""

    model: str = option(
        "demo",
        "folder in Hugging Face format, GGUF file, hub id (ID:QUANT: one GGUF quant), package:NAME (a model inside an "
        "installed package), or 'demo' for the embedded demo model",
    )
    revision: str | None = option(None, "branch, tag or commit on the hub")
    tokenizer: str | None = option(None, "folder, GGUF file or hub id of the tokenizer; default: the model's own")
    tokenizer_revision: str | None = option(None, "branch, tag or commit of the tokenizer; default: that of its model")
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and answers are token ids")
    hf_token: str | None = option(
        None, "token of the hub; default, and without a value: $HF_TOKEN, or the one of `hf auth login`", alone=""
    )
    download_dir: str | None = option(None, "folder for downloaded models; default: the hub's own cache")
    hf_overrides: str | None = option(
        None, "values that replace those of config.json, as a JSON object; nested objects are merged"
    )
    rope_scaling: str | None = option(None, "the rope_scaling of config.json, as a JSON object")
    rope_theta: float | None = option(None, "the rope_theta of config.json")
    generation_config: str = option(
        "auto",
        "where requests get sampling parameters that they leave out; auto: the model's generation_config.json; vllm: "
        "vLLM's own defaults; a folder: the generation_config.json in it, which also has the end tokens",
    )
    override_generation_config: str | None = option(
        None, """JSON that goes before the generation config, for example '{"temperature": 0.5}'"""
    )
    dtype: str = option(
        "auto",
        "type of weights and activations; auto: the checkpoint's",
        choices=("auto", "float32", "bfloat16", "float"),
        refused=("half", "float16"),
    )
    max_model_len: int | str | None = option(
        None, "longest prompt plus output, in tokens; auto: the longest that fits the KV cache"
    )
    load_format: str = option(
        "auto",
        "auto: read the checkpoint; safetensors, gguf, bitsandbytes: state its format; dummy: random weights",
        choices=("auto", "safetensors", "gguf", "bitsandbytes", "dummy"),
    )
    cpu_offload_gb: float = option(
        0.0,
        "GiB of each rank's weights that are not kept in memory: layers are read in every step, experts when tokens "
        "choose them, from --offload-to, or, on GPUs with --kernels torch, from host memory first; 0: with "
        "--offload-to, what does not fit",
    )
    offload_to: str | None = option(
        None, "folder on a fast disk for weights that are not kept in memory, as long as it runs"
    )
    quantization: str | None = option(
        None,
        "format of linear weights; none: the activations' dtype; int8: computed in int8; int4, int8_w8a16: the CPU "
        "rounds weights only, so prompts take longer; int8_fast, int4_fast: computed in int8, and much is lost, as on "
        "GPUs with int8 and int4; fp8: in fp8, which GPUs also compute in; fp8_w8a8: the CPU rounds activations to fp8 "
        "too, also for fp8 checkpoints; default: as the checkpoint packs them; others state how the checkpoint is "
        "quantized, which is found without them",
        choices=("none", *(name for name in format_names() if name not in ("plain", "packed")), *STORED_METHODS),
        aliases=("q",),
    )
    runner: str = option(
        "auto",
        "generate: continue prompts; pooling: embed them, one vector for each; auto: classify them if the model is a "
        "classifier, else continue them",
        choices=("auto", "generate", "pooling"),
    )
    max_logprobs: int = option(
        20, "the most log probabilities that a request may ask for at each token; -1: the whole vocabulary"
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "what log probabilities are of; raw: the model's logits, processed: these after penalties, masks, temperature "
        "and filters; logits: no log probabilities but the logits themselves",
        choices=get_args(LogprobsMode),
    )
    watermark_config: str | None = option(
        None,
        'mark answers, as JSON: {"scheme": "kgw", "key_file": "key.json"}, or "synthid"; `shardline watermark key` '
        'makes the key; requests with "watermark": false get no mark',
    )
    enable_prompt_embeds: bool = option(
        False, "prompts may have rows of hidden states (prompt_embeds) in place of tokens"
    )
    check_finite: bool = option(False, "look for NaN and Inf in weights and after every layer, and say where; slower")
    seed: int = option(0, "seed of dummy weights, and of requests that set no seed")

    @property
    def embeds(self) -> bool:
        """See `EngineConfig.embeds`."""
        return self.runner == "pooling"

    @property
    def hub_access(self) -> HubAccess:
        """How the hub is asked."""
        return HubAccess(self.hf_token or None, self.download_dir)

    @property
    def weight_folder(self) -> str | None:
        """Where weights lie that are read in every step; None: all stay in memory, or it is not said where."""
        return self.offload_to

    @property
    def watermark(self) -> WatermarkConfig | None:
        """`watermark_config` as fields; None: answers have no mark.

        Raises:
            ValueError: it cannot be read.
        """
        return parse_watermark(self.watermark_config)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """What replaces values of config.json.

        Raises:
            ValueError: an option is no JSON object.
        """
        overrides = json_object("hf_overrides", self.hf_overrides)
        if self.rope_scaling is not None:
            overrides["rope_scaling"] = json_object("rope_scaling", self.rope_scaling)
        if self.rope_theta is not None:
            overrides["rope_theta"] = self.rope_theta
        return overrides


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = option(
        None,
        "tokens per KV block, a multiple of 16; default: 16, or up to 32 (int8, fp8: 64) where a CPU reads them faster",
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of keys and values in the cache; auto: the activations' type; int8 and fp8 (e4m3): one byte each, with "
        "a scale per token and head; latents have a scale per token, and their rotated part stays in bf16",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    kv_cache_memory: str | int | None = option(
        None,
        "KV cache bytes per rank, for example 4GiB; default: from --gpu-memory-utilization, on CPUs at most 4 GiB a "
        "replica, or what its longest request and 16 more of 2,048 tokens need",
        aliases=("kv-cache-memory-bytes",),
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share to use of the device's memory (on the CPU: of half the free memory)",
        aliases=("device-memory-utilization",),
    )
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, without regard to the memory (for tests)")
    kv_offloading_size: float | None = option(
        None,
        "GiB of host memory of each replica, summed over its ranks, to which KV blocks are copied when they are "
        "evicted, and from which they come back; default: they are computed again",
    )
    kv_offloading_dir: str | None = option(
        None,
        "folder, the same on all hosts, in which evicted KV blocks are also kept as files, which outlive a restart; "
        "servers may share it; needs --kv-offloading-size",
    )
    kv_offloading_dir_size: float | None = option(
        None, "GiB that the files in --kv-offloading-dir may take on a host; default: 10 x --kv-offloading-size"
    )
    kv_events_config: str | None = option(
        None,
        'publish what the prefix cache holds over ZeroMQ, as JSON: {"enable_kv_cache_events": true}, and "endpoint" '
        '(tcp://127.0.0.1:5557), "replay_endpoint", "topic", "buffer_steps"; the events have the token ids of prompts',
    )

    @property
    def offloading_bytes(self) -> int:
        """`kv_offloading_size` in bytes; 0: evicted blocks are computed again.

        Raises:
            ValueError: the options of offloading do not go together.
        """
        sizes = {"kv_offloading_size": self.kv_offloading_size, "kv_offloading_dir_size": self.kv_offloading_dir_size}
        for name, size in sizes.items():
            if size is not None and not (isinstance(size, int | float) and 0 <= size <= _MOST_GIB):
                raise ValueError(f"{name} must be a number of GiB from 0 to {_MOST_GIB:,.0f}, got {size!r}")
        if self.kv_offloading_dir and not self.kv_offloading_size:
            raise ValueError(
                "kv_offloading_dir needs kv_offloading_size: blocks pass through host memory on their way to files"
            )
        if self.kv_offloading_dir_size is not None and not self.kv_offloading_dir:
            raise ValueError("kv_offloading_dir_size needs kv_offloading_dir: the folder whose files it bounds")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError("kv_offloading_size keeps cached prefixes, which enable_prefix_caching switches off")
        return int((self.kv_offloading_size or 0) * (1 << 30))

    @property
    def kv_events(self) -> KVEventsConfig:
        """`kv_events_config` as fields.

        Raises:
            ValueError: it cannot be read, or there is no prefix cache.
        """
        events = parse_kv_events(self.kv_events_config)
        if events.publishes and not self.enable_prefix_caching:
            raise ValueError("kv_events_config publishes the prefix cache, which enable_prefix_caching switches off")
        return events


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step, and of the queue."""

    max_num_seqs: int = option(128, "sequences running at once")
    max_num_batched_tokens: int = option(2048, "tokens computed in one step, prefill and decode together")
    long_prefill_token_threshold: int = option(
        0, "the most tokens of one prompt in a step, so that short prompts pass long ones; 0: as many as there are"
    )
    enable_chunked_prefill: bool = option(True, "accepted for compatibility: prefill is always chunked")
    max_num_waiting: int = option(
        2048, "requests that may wait; further ones are answered 429", aliases=("max-num-queued-reqs",)
    )
    speculative_config: str | None = option(
        None,
        "draft tokens and check them in one step, as JSON: "
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4} drafts what followed the last tokens '
        'when they occurred before; with {"method": "suffix"} also in earlier answers; {"model": "small/model", '
        '"num_speculative_tokens": 5}: a smaller model of the same vocabulary guesses, on ranks of its own with '
        '"draft_ranks": 1; the answers stay the same',
        aliases=("sc",),
    )
    share_suffixes: bool = option(
        False, "the method suffix of speculative_config guesses from the answers to all API keys, for all of them"
    )

    @property
    def speculation(self) -> Speculation:
        """`speculative_config` as fields.

        Raises:
            ValueError: it cannot be read, or `share_suffixes` has nothing to share.
        """
        given = NO_SPECULATION if self.speculative_config is None else parse_speculation(self.speculative_config)
        if not self.share_suffixes:
            return given
        if not given.suffixes.max_tree_depth:
            raise ValueError('share_suffixes needs speculative_config \'{"method": "suffix"}\'')
        return dataclasses.replace(given, suffixes=dataclasses.replace(given.suffixes, share=True))


@dataclass(frozen=True)
class EngineConfig:
    """Everything that the user can choose about an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def places_with_ray(self) -> bool:
        """Whether Ray chooses the hosts of all ranks."""
        return "ray" in (self.parallel.distributed_executor_backend, self.cluster.data_parallel_backend)

    @property
    def draft_model(self) -> ModelConfig | None:
        """The draft model, or the head; None: neither drafts."""
        asked = self.scheduler.speculation.draft
        if asked is None:
            return None
        return ModelConfig(
            model=asked.model,
            revision=asked.revision,
            load_format="dummy" if self.model.load_format == "dummy" else "auto",
            quantization=asked.quantization,
            hf_token=self.model.hf_token,
            download_dir=self.model.download_dir,
        )

    @property
    def embeds(self) -> bool:
        """Whether prompts get a vector instead of a continuation."""
        return self.model.embeds

    @property
    def max_running(self) -> int:
        """Sequences that one engine runs at a time, summed over its replicas in lockstep."""
        return self.scheduler.max_num_seqs * self.parallel.lockstep

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Make an EngineConfig from flat options, which LLM(...) and the command line use.

        Raises:
            ValueError: an option is unknown or out of range.
        """
        for line in take_keywords(options):
            logger.info("%s", line)
        parts: dict[str, Any] = {}
        for name, value in options.items():
            if isinstance(value, dict):
                options[name] = json.dumps(value, default=str)
        for field_name, alias in _long_aliases():
            if alias in options:
                options[field_name] = options.pop(alias)
        divide_tensor_ranks(options)
        length = options.get("max_model_len")
        if length == -1:
            options["max_model_len"] = "auto"
        elif isinstance(length, str):
            with contextlib.suppress(ValueError):  # the check below says what is right
                options["max_model_len"] = parse_count(length)
        if options.get("hf_token") is True:
            options["hf_token"] = ""
        for part in dataclasses.fields(cls):
            part_class = part.default_factory
            assert isinstance(part_class, type)
            names = {f.name for f in dataclasses.fields(part_class)}
            parts[part.name] = part_class(**{name: options.pop(name) for name in names & options.keys()})
        if options:
            name, known = min(options), option_names()
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
            raise ValueError(f"unknown option {name!r}; {hint}")
        return cls(**parts)


_PARTS = (ModelConfig, ParallelConfig, CacheConfig, SchedulerConfig, LoRAConfig, ClusterConfig)


def option_names() -> list[str]:
    """The names that EngineConfig.from_options accepts."""
    return [f.name for part in _PARTS for f in dataclasses.fields(part)]


def _long_aliases() -> list[tuple[str, str]]:
    """(option, other name of it), for names that are words."""
    fields = [f for part in _PARTS for f in dataclasses.fields(part)]
    return [(f.name, alias.replace("-", "_")) for f in fields for alias in f.metadata["aliases"] if "-" in alias]


def _validate(config: EngineConfig) -> None:
    for part in (config.parallel, config.scheduler, config.cache, config.lora):
        for f in dataclasses.fields(part):
            value = getattr(part, f.name)
            if isinstance(f.default, int) and not isinstance(value, int):
                raise ValueError(f"{f.name} must be a whole number, got {value!r}")
            least = 0 if f.name == "long_prefill_token_threshold" else 1
            if isinstance(value, int) and not isinstance(value, bool) and f.name not in _SIZES and value < least:
                raise ValueError(f"{f.name} must be at least {least}, got {value}")
            choices = f.metadata.get("choices")
            if choices and value not in choices:
                raise ValueError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}")
    if config.model.quantization == "w4a16":
        raise ValueError(
            "quantization w4a16 is now the format 'packed', which every packed checkpoint gets; leave quantization out"
        )
    for name in ("dtype", "load_format", "quantization", "runner", "logprobs_mode"):
        f = ModelConfig.__dataclass_fields__[name]
        if getattr(config.model, name) not in (f.default, *f.metadata["choices"], *f.metadata["refused"]):
            raise ValueError(
                f"{name} must be one of {', '.join(f.metadata['choices'])}, got {getattr(config.model, name)!r}"
            )
    draft = config.scheduler.speculation.draft
    formats = ModelConfig.__dataclass_fields__["quantization"].metadata["choices"]
    if draft is not None and draft.quantization not in (None, *formats):
        raise ValueError(
            f"quantization of speculative_config must be one of {', '.join(formats)}, got {draft.quantization!r}"
        )
    _ = config.model.config_overrides
    if not 0.0 <= config.model.cpu_offload_gb <= _MOST_GIB:
        raise ValueError(
            f"cpu_offload_gb must be a number of GiB from 0 to {_MOST_GIB:,.0f}, got {config.model.cpu_offload_gb}"
        )
    for name, asked, most in (
        ("max_num_seqs", config.scheduler.max_num_seqs, _MOST_SEQUENCES),
        ("the larger of max_loras and max_cpu_loras", config.lora.num_slots, _MOST_ADAPTERS),
    ):
        if asked > most:
            raise ValueError(f"{name} must be at most {most}, got {asked}")
    json_object("override_generation_config", config.model.override_generation_config)
    if not 0.0 < config.cache.gpu_memory_utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {config.cache.gpu_memory_utilization}")
    _ = config.cache.kv_events
    check_parallel(config.parallel)
    for name in ("lora_modules", "lora_target_modules"):
        if isinstance(getattr(config.lora, name), str):
            raise ValueError(f"{name} must be a sequence of strings, not one string")
    if config.lora.modules and not config.lora.enable_lora:
        raise ValueError("lora_modules needs enable_lora")
    if config.lora.targets and not config.lora.enable_lora:
        raise ValueError("lora_target_modules needs enable_lora")
    if config.lora.max_lora_rank > MOST_RANK:
        raise ValueError(f"max_lora_rank must be at most {MOST_RANK}, got {config.lora.max_lora_rank}")
    _ = config.cache.offloading_bytes
    if config.cache.kv_cache_memory is not None:
        parse_bytes(config.cache.kv_cache_memory)
    _check_replica_shares(config)
    if config.scheduler.speculation.num_speculative_tokens and config.embeds:
        raise ValueError("speculative_config drafts tokens, and runner pooling makes none: leave one of them out")
    if config.model.watermark is not None and config.embeds:
        raise ValueError("watermark_config marks tokens, and runner pooling makes none: leave one of them out")
    if config.model.max_logprobs < -1:
        raise ValueError(f"max_logprobs must be at least 0, or -1 for all, got {config.model.max_logprobs}")
    if not -(2**63) <= config.model.seed < 2**63:
        raise ValueError(f"seed must fit in 64 bits, got {config.model.seed}")
    length = config.model.max_model_len
    if (isinstance(length, str) and length != "auto") or (isinstance(length, int) and length < 1):
        raise ValueError(f"max_model_len must be a positive number of tokens or 'auto', got {length!r}")


def _check_replica_shares(config: EngineConfig) -> None:
    """Whether the replicas of this node are among all replicas."""
    cluster, count = config.cluster, config.parallel.data_parallel_size
    local, first = cluster.data_parallel_size_local, cluster.data_parallel_start_rank
    if local is not None and local < 0:
        raise ValueError(f"data_parallel_size_local must be at least 0, got {local}")
    if cluster.data_parallel_address is not None and not 0 <= first <= first + (local or 0) <= count:
        raise ValueError(
            f"this node's replicas {first} to {first + (local or 0) - 1} are not all among the {count} of "
            "data_parallel_size: change data_parallel_start_rank or data_parallel_size_local"
        )
    if not cluster.has_nodes and not config.places_with_ray and (first or local not in (None, count)):
        raise ValueError(
            "data_parallel_size_local and data_parallel_start_rank share replicas out over nodes, which needs "
            "data_parallel_address: where the other nodes reach the head"
        )
