"""Hostile model folders: the demo model's files, of which some are wrong, cut, endless or not files at all."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardline.checkpoints.hub import DEMO_FOLDER
from tests.hostile import draws, regexes, templates

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_OPTIONAL = (
    *FILES,
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
Config = dict[str, Any]


def _read(folder: Path, name: str) -> Config:
    value = json.loads((DEMO_FOLDER / name).read_text())
    assert isinstance(value, dict)
    return value


def _write(folder: Path, name: str, value: Any) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(value))


def _set(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: _write(folder, name, {**_read(folder, name), **fields})


def _replace(name: str, data: bytes) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(data)

    return replace


def _link(name: str, target: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return link


def _fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def _folder(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def _template(source: str) -> Callable[[Path], None]:
    return _set("tokenizer_config.json", chat_template=source)


def _normalizer(*steps: Config) -> Callable[[Path], None]:
    return _set("tokenizer.json", normalizer={"type": "Sequence", "normalizers": list(steps)})


_DOUBLING = {"type": "Replace", "pattern": {"Regex": "(.)"}, "content": "aa"}
NAMED: dict[str, Callable[[Path], None]] = {
    "rope_scaling.factor 1e308": _set("config.json", rope_scaling={"rope_type": "linear", "factor": 1e308}),
    "tokenizer_config.json nested 100,000 deep": _replace("tokenizer_config.json", b"[" * 100_000 + b"]" * 100_000),
    "tokenizer_config.json with objects nested 100,000 deep": _replace(
        "tokenizer_config.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    ),
    "a FIFO as generation_config.json": _fifo("generation_config.json"),
    "a FIFO as tokenizer.json": _fifo("tokenizer.json"),
    "a FIFO as chat_template.jinja": _fifo("chat_template.jinja"),
    "/dev/zero as generation_config.json": _link("generation_config.json", "/dev/zero"),
    "/dev/zero as tokenizer.json": _link("tokenizer.json", "/dev/zero"),
    "a link to itself as config.json": _link("config.json", "config.json"),
    "a pre-tokenizer that panics": _set(
        "tokenizer.json", pre_tokenizer={"type": "Split", "pattern": {"Regex": "(?=(a*)*)$"},
        "behavior": "Isolated", "invert": True}
    ),
    "a normalizer that doubles 40 times": _normalizer(*[_DOUBLING] * 40),
    "nested empty loops as template": _template(templates.nested_loops(6, 99_999)),
    "a wide format as template": _template("{{ '%3000000000d' % 1 }}"),
}  # fmt: skip
"""The literal examples of the attack that this corpus grew from."""

_ROPE_TYPES = ("linear", "dynamic", "yarn", "llama3", "longrope", "default", "mrope", None, 7)


def _odd_config(rng: random.Random, folder: Path) -> None:
    config = _read(folder, "config.json")
    for _ in range(rng.choice((1, 1, 2, 4))):
        key = rng.choice(
            [*config, "rope_scaling", "quantization_config", "sliding_window", "layer_types", "num_experts", "auto_map"]
        )
        config[key] = rng.choice((draws.value, lambda rng: draws.number(rng)))(rng)
    if rng.random() < 0.3:
        fields = (
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "beta_fast",
            "long_factor",
        )
        config["rope_scaling"] = {
            "rope_type": rng.choice(_ROPE_TYPES),
            **{field: draws.number(rng) for field in fields},
        }
    if rng.random() < 0.2:
        method = rng.choice(("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "x", 3))
        config["quantization_config"] = {
            "quant_method": method,
            "bits": draws.number(rng),
            "config_groups": draws.value(rng),
        }
    if rng.random() < 0.1:
        config["model_type"] = rng.choice(
            ("gemma3", "qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "../x", "", "__init__", "demo")
        )
    _write(folder, "config.json", config)


def _odd_tokenizer(rng: random.Random, folder: Path) -> None:
    tokenizer = _read(folder, "tokenizer.json")
    regex = {"Regex": regexes.regex(rng)}
    parts: dict[str, Any] = {
        "normalizer": rng.choice(
            (
                {"type": "Replace", "pattern": regex, "content": "ab" * draws.size(rng, 10_000)},
                {"type": "Sequence", "normalizers": [_DOUBLING] * draws.size(rng, 60)},
                {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
                {"type": "Prepend", "prepend": "a" * draws.size(rng, 10**6)},
                draws.value(rng),
            )
        ),
        "pre_tokenizer": rng.choice(
            (
                {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": rng.random() < 0.5},
                {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True,
                "trim_offsets": True}] * draws.size(rng, 50)},
                {"type": "FixedLength", "length": 0},
                draws.value(rng),
            )
        ),
        "added_tokens": [
            {"id": draws.number(rng), "content": draws.text(rng), "special": True, "single_word": False,
            "lstrip": True, "rstrip": True, "normalized": True}
            for _ in range(draws.size(rng, 30))
        ],
        "decoder": rng.choice(({"type": "Replace", "pattern": regex, "content": "a" * 99}, {"type": "Strip",
        "content": "a", "start": 2**40, "stop": 0}, draws.value(rng))),
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        "pair": [], "special_tokens": {}},
        "truncation": {"max_length": 0, "strategy": "LongestFirst", "stride": 2**40, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x"},
        "model": draws.value(rng),
        "version": draws.value(rng),
    }  # fmt: skip
    for name in rng.sample(list(parts), rng.randrange(1, 3)):
        tokenizer[name] = parts[name]
    if rng.random() < 0.2:
        model = tokenizer.get("model")
        vocabulary = (model.get("vocab") if isinstance(model, dict) else None) or {}
        for word in list(vocabulary)[: draws.size(rng, 500)]:
            vocabulary[word] = rng.choice((2**31, 0, -1, 10**6))
    _write(folder, "tokenizer.json", tokenizer)


def _odd_names(rng: random.Random, folder: Path) -> None:
    """Special tokens, ends and templates of odd types."""
    config = _read(folder, "tokenizer_config.json")
    for _ in range(rng.choice((1, 2))):
        key = rng.choice([*config, "bos_token", "eos_token", "chat_template", "added_tokens_decoder"])
        config[key] = rng.choice(
            (draws.value(rng), {"content": draws.value(rng)}, [{"name": "default", "template": draws.text(rng)}, {}])
        )
    if rng.random() < 0.3:
        config["chat_template"] = templates.template(rng)
    _write(folder, "tokenizer_config.json", config)
    generation = _read(folder, "generation_config.json")
    generation[rng.choice((*generation, "eos_token_id", "temperature", "top_k"))] = draws.value(rng)
    _write(folder, "generation_config.json", generation)


def _odd_bytes(rng: random.Random, folder: Path) -> None:
    """A file that is cut, mutated, nested or replaced by something else."""
    name = rng.choice(_OPTIONAL)
    source = DEMO_FOLDER / name
    data = source.read_bytes() if source.is_file() else b'{"a": 1}'
    place, depth = rng.randrange(len(data)), draws.size(rng, 200_000)
    change = rng.choice(
        (
            lambda: _replace(name, data[:place]),
            lambda: _replace(name, data[:place] + rng.randbytes(1) + data[place + 1 :]),
            lambda: _replace(name, b"[" * depth + b"]" * depth),
            lambda: _replace(name, b'{"a":' * depth + b"0" + b"}" * depth),
            lambda: _replace(name, b'{"eos_token_id": 1' + b"0" * draws.size(rng, 20_000) + b"}"),
            lambda: _replace(name, json.dumps(draws.value(rng)).encode()),
            lambda: _replace(name, b"\xff\xfe" + data),
            lambda: _replace(name, b""),
            lambda: _fifo(name),
            lambda: _folder(name),
            lambda: _link(name, rng.choice(("/dev/zero", "/dev/full", "/nowhere", name, ".", "/proc/self/mem"))),
        )
    )()
    change(folder)


def _odd_weights(rng: random.Random, folder: Path) -> None:
    """Headers of safetensors that lie."""
    tensors = {
        "t": {
            "dtype": rng.choice(("BF16", "F4", 3)),
            "shape": [draws.number(rng), 2],
            "data_offsets": [0, draws.number(rng)],
        }
    }
    header = json.dumps(rng.choice((tensors, draws.value(rng), {"__metadata__": draws.value(rng), **tensors}))).encode()
    length = rng.choice((len(header), len(header), 2**63 - 1, 0, 100 << 20, 2**64 - 1))
    data = length.to_bytes(8, "little") + header + bytes(16)
    name = rng.choice(("model.safetensors", "model.safetensors.index.json"))
    if name.endswith(".json"):
        places = {"t": rng.choice(("../../etc/passwd", "/dev/zero", "absent.safetensors", 7, "model.safetensors"))}
        data = json.dumps({"weight_map": rng.choice((places, draws.value(rng)))}).encode()
    _replace(name, data)(folder)


_CHANGES = (_odd_config, _odd_config, _odd_tokenizer, _odd_tokenizer, _odd_names, _odd_bytes, _odd_bytes, _odd_weights)


def make_folder(folder: Path) -> None:
    """The demo model's files; the weights are a link."""
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(DEMO_FOLDER / name, folder / name)
    (folder / "model.safetensors").symlink_to(DEMO_FOLDER / "model.safetensors")


def damage(rng: random.Random, folder: Path) -> None:
    """Make a folder hostile."""
    rng.choice(_CHANGES)(rng, folder)
