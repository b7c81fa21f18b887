"""A fingerprint changes with the weights and with nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import defstruct
from msgspec.structs import astuple

from shardline.checkpoints.hub import resolve_model
from shardline.checkpoints.lookup import decoder_spec
from shardline.deployment import fingerprint
from shardline.deployment.fingerprint import numeric_contract, weights_fingerprint
from shardline.models.feed_forward import Dense, Routing
from shardline.models.parts import Norm, Part, Rope
from shardline.watermark.keys import KGWKey, SynthIDKey
from tests.deployment.machines import GIB, machine, resolve_on
from tests.models.checkpoints import make_checkpoint
from tests.runtime.loader.packer import pack_checkpoint


def _of(folder: Path, *, weights: bool = True, dummy_seed: int | None = None) -> str:
    files = resolve_model(str(folder), weights=weights)
    return weights_fingerprint(json.dumps(files.config, sort_keys=True), files.weight_files, dummy_seed)


def test_same_weights_elsewhere_are_the_same(tmp_path: Path) -> None:
    one = make_checkpoint("llama", tmp_path / "one")
    shutil.copytree(one, tmp_path / "two")
    assert len(_of(one)) == 16
    assert _of(one) == _of(tmp_path / "two")


def test_other_weights_or_another_configuration_are_not(tmp_path: Path) -> None:
    folders = [
        make_checkpoint("llama", tmp_path / "plain"),
        make_checkpoint("llama", tmp_path / "seed", seed=1),
        make_checkpoint("llama", tmp_path / "eps", rms_norm_eps=1e-4),
        make_checkpoint("llama", tmp_path / "dtype", dtype="bfloat16"),
        make_checkpoint("llama", tmp_path / "shards", max_shard_size="100KB"),
    ]
    assert len({_of(folder) for folder in folders}) == len(folders)


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_SAMPLE_BYTES", 1 << 14)
    one = make_checkpoint("llama", tmp_path / "one")
    two = make_checkpoint("llama", tmp_path / "two", seed=1)
    size = (one / "model.safetensors").stat().st_size
    samples = fingerprint._samples(size)
    assert sum(count for _, count in samples) < size / 2
    assert all(offset + count <= size for offset, count in samples)
    assert _of(one) != _of(two)
    assert _of(one) == _of(one)


def test_a_fingerprint_stays_what_it_was() -> None:
    """A client that compares answers of two releases relies on it."""
    resolved = resolve_on(machine(), device="cpu")
    assert numeric_contract(resolved, "isa").fingerprint == "sl-d932a1776c0e-bfloat16-n12-isa"
    fast = resolve_on(machine(), numerics="fast", tensor_parallel_size=2, quantization="int8", kv_cache_dtype="int8")
    assert numeric_contract(fast, "isa").fingerprint == "sl-d932a1776c0e-bfloat16-int8-kv-int8-fast-tp2-isa"
    dummy = resolve_on(machine(), load_format="dummy", seed=3)
    assert numeric_contract(dummy, "isa").fingerprint == "sl-50adefee620f-bfloat16-n12-isa"


def test_contracts_are_equal_if_their_fingerprints_are() -> None:
    contracts = [
        numeric_contract(resolve_on(machine(), device="cpu", **options), path)
        for options in ({}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"load_format": "dummy"}, {})
        for path in ("isa", "other")
    ]
    assert len({contract.sha256 for contract in contracts}) == len({c.fingerprint for c in contracts}) == 8
    assert contracts[0] == contracts[-2]


@pytest.mark.parametrize(
    ("model_type", "digest"), [("deepseek_v3", "886e6f524ade"), ("gpt_oss", "442d02eb2867"), ("gemma2", "fb59d045c623")]
)
def test_the_name_of_a_spec_stays_what_it_was(model_type: str, digest: str) -> None:
    described = fingerprint._describe(decoder_spec({"model_type": model_type}))
    assert hashlib.blake2b(described.encode(), digest_size=6).hexdigest() == digest


@pytest.mark.parametrize("part", [Routing(8, 2), Dense(16, "silu"), Norm("rms", 1e-6), Rope((1.0,))])
def test_a_later_field_counts_if_it_is_set(part: Part) -> None:
    new: Any = defstruct(type(part).__name__, [("twist", int, 0)], bases=(type(part),), frozen=True, array_like=True)
    assert fingerprint._describe(new(*astuple(part))) == fingerprint._describe(part)
    assert fingerprint._describe(new(*astuple(part), twist=1)) == fingerprint._describe(part)[:-1] + ", twist=1)"


def test_a_packed_format_is_named_with_its_groups(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    for size, name in ((32, "packed_32"), (-1, "packed_rows")):
        config = {"quant_method": "gptq", "bits": 4, "group_size": size}
        folder = tmp_path / name
        pack_checkpoint(model, folder, tmp_path / f"{name}-plain", config)
        kept = resolve_on(machine((8 * GIB, 7 * GIB)), model=str(folder))
        assert f"-bfloat16-{name}-n12-" in numeric_contract(kept, "isa").fingerprint


def test_dummy_weights_are_named_by_their_seed(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    assert _of(folder, weights=False, dummy_seed=1) != _of(folder, weights=False, dummy_seed=2)


def test_servers_with_unlike_keys_have_unlike_contracts() -> None:
    plain = resolve_on(machine())
    marks = [(), (KGWKey(hashing_key=1),), (KGWKey(hashing_key=2),), (SynthIDKey(keys=(1, 2)),)]
    prints = [numeric_contract(msgspec.structs.replace(plain, watermark=mark), "avx2").fingerprint for mark in marks]
    assert len(set(prints)) == len(marks)
    assert ["-kgw" in name for name in prints] == [False, True, True, False]
    assert all(len(name) <= len(prints[0]) + len("-synthid0123") for name in prints)
