"""The second tier of the KV cache: how large it is, where its files are, and what is refused."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from shardline.deployment.block_folder import KEY_BYTES, block_path, folder_secret, key_of, layout_digest, rank_folder
from shardline.deployment.deployment import NO_TIER
from shardline.engine.tiers import content_key
from tests.deployment.machines import GIB, machine, resolve_on


def test_its_size_is_that_of_all_ranks_of_a_replica() -> None:
    one, four = (resolve_on(machine(), kv_offloading_size=0.5, tensor_parallel_size=n).cache for n in (1, 4))
    for cache in (one, four):
        assert cache.tier.num_slots == GIB // 2 // sum(cache.block_bytes)
        assert cache.tier.num_bytes == cache.tier.num_slots * sum(cache.block_bytes)
        assert (cache.tier.folder, cache.tier.folder_bytes) == ("", 0)
    assert resolve_on(machine()).cache.tier == NO_TIER
    assert resolve_on(machine(), kv_offloading_size=0).cache.tier == NO_TIER


def test_files_take_ten_times_as_much_unless_the_user_says() -> None:
    tiers = [
        resolve_on(machine(), kv_offloading_size=1, kv_offloading_dir="blocks", **more).cache.tier
        for more in ({}, {"kv_offloading_dir_size": 2.5})
    ]
    assert [tier.folder_bytes for tier in tiers] == [10 * GIB, 2.5 * GIB]
    assert [tier.folder for tier in tiers] == [os.path.abspath("blocks")] * 2


def test_host_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r" and a second tier of 40\.\d\d GiB need .* 32.00 GiB .*; lower --kv-off"):
        resolve_on(machine(free_memory=32 * GIB), kv_offloading_size=20, data_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"^the second tier of .* needs 100\.00 GiB, but .*; lower --kv-offloading-size"
    ):
        resolve_on(machine((80 * GIB, 79 * GIB)), kv_offloading_size=100)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("option", ["kv_offloading_size", "kv_offloading_dir_size"])
def test_what_holds_no_block_is_refused_and_what_is_advised_does(option: str, block_size: int) -> None:
    options: dict[str, object] = {"kv_offloading_size": 1, "kv_offloading_dir": "blocks", "block_size": block_size}
    with pytest.raises(ValueError, match=rf"^--{option.replace('_', '-')} is .*, and a block needs .* KiB;") as error:
        resolve_on(machine(), **{**options, option: 1e-6})
    advised = re.findall(r"at least ([0-9.e-]+)", str(error.value))[0]
    assert resolve_on(machine(), **{**options, option: float(advised)}).cache.tier.folder_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_offloading_size": -1}, "must be a number of GiB"),
        ({"kv_offloading_size": float("nan")}, "must be a number of GiB"),
        ({"kv_offloading_size": "4GiB"}, "must be a number of GiB"),
        ({"kv_offloading_size": 1e30}, r"from 0 to 1,073,741,824, got 1e\+30"),
        ({"kv_offloading_dir": "/tmp"}, "needs kv_offloading_size"),
        ({"kv_offloading_size": 1, "kv_offloading_dir_size": 1}, "needs kv_offloading_dir"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching switches off"),
        ({"kv_offloading_backend": "lmcache"}, "by their own means"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve_on(machine(), **options)


def test_the_backend_of_vllm_is_taken() -> None:
    assert resolve_on(machine(), kv_offloading_size=1, kv_offloading_backend="native").cache.tier.num_slots > 0


def test_layouts_whose_blocks_have_another_form_have_other_folders() -> None:
    changes: list[dict[str, object]] = [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"block_size": 64},
        {"kv_cache_dtype": "int8"},
        {"pipeline_parallel_size": 2, "pipeline_stages": "1,7"},
    ]
    deployments = [resolve_on(machine(), **one) for one in changes]
    assert len({layout_digest(one) for one in deployments}) == len(changes)
    same = {"data_parallel_size": 2, "max_num_seqs": 4, "kv_cache_memory": "1GiB", "kv_offloading_size": 1}
    assert layout_digest(resolve_on(machine(), **same)) == layout_digest(deployments[0])
    grid = deployments[1].grid
    folders = {rank_folder(Path("/blocks"), b"layout", grid.place(rank)) for rank in range(grid.world_size)}
    assert len(folders) == 2


def test_a_key_is_read_from_its_path() -> None:
    key = content_key(bytes(range(200, 216)), 300)
    assert len(key) == KEY_BYTES
    path = block_path(Path("/blocks"), key)
    assert key_of(path.parent.name, path.name) == key
    assert key_of(path.parent.name, path.name[:-1]) is None
    assert key_of("zz", path.name) is None


def test_servers_that_start_together_get_the_same_secret(tmp_path: Path) -> None:
    folder, secrets = tmp_path / "some" / "blocks", list[bytes]()
    threads = [threading.Thread(target=lambda: secrets.append(folder_secret(folder))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(secrets) == 8
    assert set(secrets) == {folder_secret(folder)}
    assert [path.name for path in folder.iterdir()] == ["secret"]
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "secret").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be used: Not a directory; name a folder"):
        folder_secret(tmp_path / "file" / "blocks")
    (tmp_path / "secret").write_text("mine")
    with pytest.raises(ValueError, match="of 4 bytes, which is none of ours"):
        folder_secret(tmp_path)
