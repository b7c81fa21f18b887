"""LoRA adapters as PEFT stores them, adapter_config.json and adapter_model.safetensors, or in GGUF; checked without
torch.

An adapter adds scale * up (down x) to linears: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al., 2021).
PEFT calls `down` lora_A, [rank, in], and `up` lora_B, [out, rank]. The scale is alpha / rank, or alpha / sqrt(rank)
with rsLoRA (Kalajdzievski, 2023). With DoRA (Liu et al., 2024), each row of the changed weight gets the norm that a
magnitude says. The embedding is a linear of one-hot rows. It and the lm_head may also be there whole, as "modules to
save".
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from shardline.checkpoints.adapter_targets import chosen_kinds, target_of
from shardline.checkpoints.checkpoint import read_header
from shardline.checkpoints.gguf.adapter import read_changes
from shardline.checkpoints.hub import fetch_files
from shardline.checkpoints.lookup import family
from shardline.checkpoints.wrapper import language_model_key
from shardline.config.engine import HubAccess
from shardline.models.adapters import (
    EMBEDDING,
    LARGEST_ALPHA,
    LM_HEAD,
    LinearChange,
    WholeWeight,
    adaptable_parameters,
    is_of_expert,
)
from shardline.models.llama_like import StackedExperts
from shardline.models.parameters import kind_of
from shardline.models.parts import Shape
from shardline.models.spec import DecoderSpec
from shardline.models.stored_layout import TensorEntry

CONFIG_FILE, WEIGHTS_FILE, GGUF_SUFFIX = "adapter_config.json", "adapter_model.safetensors", ".gguf"
_MAX_CONFIG_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 22
_DTYPES = ("F32", "F16", "BF16")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of initialising that change the base weights, so that the stored adapter does not fit the base model."""
_UNSUPPORTED: Mapping[str, str] = {
    "lora_bias": "biases of adapters (lora_bias) are not supported yet",
    "ensure_weight_tying": "one change of a tied embedding and lm_head (ensure_weight_tying) is not supported",
    "trainable_token_indices": "new token embeddings (trainable_token_indices) are not supported yet",
    "layer_replication": "layer_replication is not supported",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens) is not supported",
    "use_qalora": "QALoRA (use_qalora) is not supported",
    "arrow_config": "Arrow (arrow_config) is not supported",
}


class _Config(msgspec.Struct):
    """The keys of adapter_config.json that decide what an adapter computes."""

    peft_type: str
    r: int
    lora_alpha: float
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = False
    bias: str | None = "none"
    init_lora_weights: Any = True
    use_dora: bool | None = False
    lora_bias: Any = None
    ensure_weight_tying: Any = None
    target_parameters: list[str] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: Any = None
    arrow_config: Any = None


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits a model."""

    folder: Path
    """It may also be a GGUF file."""
    linears: tuple[LinearChange, ...]
    wholes: tuple[WholeWeight, ...] = ()

    @property
    def rank(self) -> int:
        """Its largest rank."""
        return max((linear.rank for linear in self.linears), default=0)

    def digest(self) -> str:
        """A name of its content. This reads the whole file.

        Raises:
            ValueError: it cannot be read.
        """
        found = blake2b(digest_size=16)
        try:
            for file in _files(self.folder):
                with file.open("rb") as stream:
                    found.update((GGUF_SUFFIX if file.suffix == GGUF_SUFFIX else file.name).encode())
                    while chunk := stream.read(_CHUNK_BYTES):
                        found.update(chunk)
        except OSError as error:
            raise ValueError(f"the adapter in {self.folder} cannot be read: {error.strerror or error}") from None
        return found.hexdigest()


def find_adapter(name: str, hub: HubAccess) -> Path:
    """The folder of an adapter that the user names: itself, or that of the hub repository whose id it is.

    Raises:
        ValueError: there is no such repository, or it cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists() or name.count("/") != 1 or name.startswith(("/", ".", "~")):
        return path.resolve()
    return fetch_files(name, (CONFIG_FILE, WEIGHTS_FILE), hub)


def read_adapter(
    folder: Path, spec: DecoderSpec, max_rank: int, *, kinds: Collection[str] | None = None, experts: bool = True
) -> Adapter:
    """Read and check an adapter for the model `spec`: a folder that PEFT has written, or a GGUF file. Only headers are
    read. `kinds`: what the deployment lets adapters change; None: all. `experts`: whether it could let them change
    experts.

    Raises:
        ValueError: it is no adapter, is damaged, fits another model, or needs what is not supported.
    """
    try:
        return _checked(
            _read_adapter(folder, spec), spec, max_rank, chosen_kinds(spec) if kinds is None else kinds, experts
        )
    except ValueError as error:
        raise ValueError(f"the adapter in {folder} cannot be used: {error}") from None
    except OSError as error:
        raise ValueError(f"the adapter in {folder} cannot be read: {error.strerror or error}") from None


def state_of(folder: Path) -> object:
    """What is equal as long as nobody has written an adapter's files again."""
    found: list[tuple[int, int, int] | None] = []
    for file in _files(folder):
        try:
            stat = file.stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _files(folder: Path) -> tuple[Path, ...]:
    """The files of the adapter that `folder` names."""
    if folder.suffix == GGUF_SUFFIX:
        return (folder,)
    return folder / CONFIG_FILE, folder / WEIGHTS_FILE


def _read_adapter(folder: Path, spec: DecoderSpec) -> Adapter:
    if folder.suffix == GGUF_SUFFIX:
        if folder.exists() and not folder.is_file():  # to open a pipe waits for a writer
            raise ValueError("it is no file")
        return Adapter(folder, read_changes(folder, spec))
    config = _read_config(folder)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        others = [name for name in ("adapter_model.bin", "adapter_model.pt") if (folder / name).exists()]
        hint = f"{others[0]} may run code when it is read; save the adapter again as safetensors" if others else ""
        raise ValueError(f"it has no {WEIGHTS_FILE}" + (f" ({hint})" if hint else ""))
    modules = _by_module(read_header(file))
    linears: list[LinearChange] = []
    wholes: list[WholeWeight] = []
    outputs: dict[str, int] = {}
    """Rows of each module that is used."""
    has_experts = any(".experts" in module for module in modules)
    for name, shape in adaptable_parameters(spec):
        if not has_experts and is_of_expert(name):
            continue  # there may be thousands of them
        source = family(spec.model_type).tensor_source(name, spec)
        keys = [key.removesuffix(".weight") for key in (source.key, *source.aliases)]
        module = pattern = None if source.index else next((key for key in keys if key in modules), None)
        if module is None and (stacked := source if source.index else StackedExperts("mlp.experts").find(name, spec)):
            source, pattern = stacked, stacked.key
            module = _module_of_parameter(pattern, config.target_parameters or ())
        if module is None or pattern is None or module not in modules or source.columns is not None:
            continue
        tensors = modules[module]
        first, count = source.rows or (0, shape[0])
        rows = slice(first, first + count * source.row_step, source.row_step)
        outputs[module] = max(outputs.get(module, 0), first - first % source.row_step + count * source.row_step)
        if name in (EMBEDDING, LM_HEAD) and (whole := _whole(module, tensors, spec)) is not None:
            wholes.append(WholeWeight(name, whole))
        else:
            linears.append(_adapted(name, module, pattern, tensors, shape, rows, source.index or (0, 1), config))
    _check_leftovers(modules, outputs)
    for module, rows_of_module in outputs.items():
        up = modules[module].get("up")
        if up is not None and up.shape[0] != rows_of_module:
            raise ValueError(
                f"{module} has {up.shape[0]} outputs, and {rows_of_module} in this model; it is of another model"
            )
    return Adapter(folder, tuple(linears), tuple(wholes))


def _checked(adapter: Adapter, spec: DecoderSpec, max_rank: int, kinds: Collection[str], experts: bool) -> Adapter:
    """The adapter.

    Raises:
        ValueError: it changes nothing, or what the deployment does not let it, or does not fit into a slot.
    """
    if not adapter.linears and not adapter.wholes:
        raise ValueError("it changes no linear of this model")
    expert = next((one.name for one in adapter.linears if is_of_expert(one.name)), None)
    if not experts and expert is not None:
        raise ValueError(
            f"it changes the expert {expert.removesuffix('.weight')}, which adapters cannot where experts move "
            "(--enable-eplb), or where replicas share them (--enable-expert-parallel with --data-parallel-size)"
        )
    names = [*(one.name for one in adapter.linears), *(one.name for one in adapter.wholes)]
    if (left := next((name for name in names if kind_of(name) not in kinds), None)) is not None:
        more = sorted({target_of(spec, kind) for kind in map(kind_of, names) if kind not in kinds})
        raise ValueError(
            f"it changes {left.removesuffix('.weight')}, for which --lora-target-modules keeps no memory; start with "
            f"{', '.join(more)} there as well"
        )
    if adapter.rank > max_rank:
        raise ValueError(f"its rank is {adapter.rank}, and at most {max_rank} is allowed (--max-lora-rank)")
    if adapter.wholes:
        changeable = adaptable_parameters(spec)
        may_change = {kind for kind in kinds if experts or not is_of_expert(kind)}
        per_rank = {name: sum(shape) for name, shape in changeable if kind_of(name) in may_change}
        own = sum(one.rank * per_rank[one.name] for one in adapter.linears)
        own += len(adapter.wholes) * spec.vocab_size * spec.hidden_size
        if own > max_rank * sum(per_rank.values()):
            needed = -(-own // sum(per_rank.values()))
            raise ValueError(
                f"its whole modules need the memory of an adapter of rank {needed}: raise --max-lora-rank to that, "
                f"which has {max_rank} now"
            )
    return adapter


def _read_config(folder: Path) -> _Config:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"it has no {CONFIG_FILE}; give the folder that PEFT's save_pretrained has written")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise ValueError(f"{CONFIG_FILE} has more than {_MAX_CONFIG_BYTES} bytes")
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_Config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE} is malformed: {error}") from None
    if config.peft_type != "LORA":
        raise ValueError(f"it is of type {config.peft_type!r}, and only LORA is supported")
    for key, reason in _UNSUPPORTED.items():
        if getattr(config, key):
            raise ValueError(reason)
    if config.bias not in (None, "none"):
        raise ValueError(f"bias {config.bias!r} changes biases of the base model, which is not supported")
    way = config.init_lora_weights
    if isinstance(way, str) and way.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights {way!r} has changed the base weights; save it with "
            "path_initial_model_for_weight_conversion, which makes an ordinary adapter of it"
        )
    for number in (config.lora_alpha, *(config.alpha_pattern or {}).values()):
        if not abs(number) <= LARGEST_ALPHA:
            raise ValueError(f"alpha is {number}, and must be a number of 32 bits")
    return config


_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:(?!\.lora_).)+?)\."
    r"(?:(?P<down>lora_A(?:\.default)?\.weight|lora_embedding_A(?:\.default)?)"
    r"|(?P<up>lora_B(?:\.default)?\.weight|lora_embedding_B(?:\.default)?)"
    r"|(?P<magnitude>lora_magnitude_vector(?:\.default)?(?:\.weight)?)"
    r"|(?P<base>base_layer\.weight)|(?P<whole>(?:modules_to_save\.)?(?:default\.)?weight))"
)
"""The keys of tensors. PEFT adds the base weight of an embedding or lm_head that it changes."""


def _by_module(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each module by their role, by its key in the base model's checkpoint."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        match = _TENSOR.fullmatch(key)
        if match is None or match.lastgroup is None:
            raise ValueError(f"it has the tensor {key[:200]!r}, which is neither lora_A nor lora_B of a linear")
        module, role = language_model_key(match["module"] + ".")[:-1], match.lastgroup
        if role in modules.setdefault(module, {}):
            raise ValueError(f"it has {key.rpartition(module)[2][1:200]} of {module[:200]} twice")
        modules[module][role] = entry
    return modules


def _whole(module: str, tensors: Mapping[str, TensorEntry], spec: DecoderSpec) -> TensorEntry | None:
    """The weight of an embedding or lm_head that stands in place of the base model's; None: there is none."""
    for role in tensors.keys() & {"base", "whole"}:
        entry, expected = tensors[role], (spec.vocab_size, spec.hidden_size)
        if entry.shape != expected:
            raise ValueError(
                f"{module} has a weight {list(entry.shape)}, and this model one {list(expected)}; adapters with a "
                "vocabulary of their own are not supported"
            )
        _check_type(module, entry)
    return tensors.get("whole")


def _module_of_parameter(key: str, targets: Collection[str]) -> str | None:
    """The name of the module by which an adapter changes the stacked weights `key` of experts; None: it does not.

    PEFT wraps a module once for each of its parameters that is a target, the first one innermost.
    """
    experts = key.rpartition(".")[0]
    own = [one for name in ("gate_up_proj", "down_proj") if _is_named(one := f"{experts}.{name}", targets)]
    return experts + ".base_layer" * (len(own) - 1 - own.index(key)) if key in own else None


def _is_named(key: str, targets: Collection[str]) -> bool:
    return any(key == target or key.endswith(f".{target}") for target in targets)


def _check_type(module: str, entry: TensorEntry) -> None:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"{module} has type {entry.dtype}; supported: {', '.join(_DTYPES)}")


def _adapted(
    name: str,
    module: str,
    pattern: str,
    tensors: Mapping[str, TensorEntry],
    shape: Shape,
    rows: slice,
    expert: tuple[int, int],
    config: _Config,
) -> LinearChange:
    """The change of the linear `name` of `shape`. `pattern`: how patterns name it. `expert`: which one, of how many,
    the tensors stack."""
    down, up, magnitude = tensors.get("down"), tensors.get("up"), tensors.get("magnitude")
    if "whole" in tensors:
        raise ValueError(
            f"it has the whole module {module[:200]} (modules_to_save); only an embedding and lm_head may be whole"
        )
    if down is None or up is None:
        raise ValueError(f"{module} has only one of lora_A and lora_B")
    rank = _pattern_value(config.rank_pattern, pattern, config.r)
    alpha = _pattern_value(config.alpha_pattern, pattern, config.lora_alpha)
    if len(down.shape) != 2 or down.shape[1] != shape[1] or len(up.shape) != 2:
        raise ValueError(
            f"{module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, and a linear {list(shape)} of this "
            "model needs [rank, in] and [out, rank]; the adapter is of another model"
        )
    if not (rank >= 1 and rank * expert[1] == down.shape[0] == up.shape[1]):
        experts = f" for each of {expert[1]} experts" if expert[1] > 1 else ""
        raise ValueError(
            f"{module} has rank {rank}{experts} in {CONFIG_FILE}, but lora_A {list(down.shape)} and lora_B "
            f"{list(up.shape)}"
        )
    if (magnitude is not None) != bool(config.use_dora):
        named = "has no lora_magnitude_vector, and" if magnitude is None else "has a lora_magnitude_vector, but"
        raise ValueError(f"{module} {named} use_dora is {str(bool(config.use_dora)).lower()} in {CONFIG_FILE}")
    if magnitude is not None and expert[1] > 1:
        raise ValueError(f"DoRA of stacked experts ({module}) is not supported, nor does PEFT make it")
    if magnitude is not None and magnitude.shape != up.shape[:1]:
        raise ValueError(
            f"{module} has lora_magnitude_vector {list(magnitude.shape)}, and lora_B has {up.shape[0]} rows"
        )
    for entry in (down, up, *([] if magnitude is None else [magnitude])):
        _check_type(module, entry)
    scale = alpha / (math.sqrt(rank) if config.use_rslora else rank)
    number, count = expert
    change = LinearChange(name, down, up, rows, rank, scale, magnitude=magnitude)
    return replace(change, expert=number, num_experts=count, in_columns=count > 1)


def _pattern_value(patterns: Mapping[str, Any] | None, module: str, usual: Any) -> Any:
    """The value of the first pattern that names the module: its whole key, or the end of it.

    PEFT takes regular expressions. Those of a stranger may take for ever: only names are taken, with its own ".*\\.".
    """
    for pattern, value in (patterns or {}).items():
        name = pattern.removeprefix(".*\\.").removeprefix("^").removesuffix("$")
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f"{pattern[:200]!r} is a regular expression; rank_pattern and alpha_pattern take names only"
            )
        if module == name or (module.endswith(f".{name}") and not pattern.startswith("^")):
            return value
    return usual


def _check_leftovers(modules: Iterable[str], used: Collection[str]) -> None:
    """Refuse an adapter of modules that are no linears of the model, or that cannot be adapted here."""
    if left := next((module for module in modules if module not in used), None):
        raise ValueError(
            f"it changes {left[:200]}, which this model does not have, or where adapters are not supported yet "
            "(norms, routers, latent up-projections)"
        )
