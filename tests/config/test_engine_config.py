"""Options: known names, ranges, sizes; and the rank grid."""

from __future__ import annotations

import itertools
import re

import pytest

from shardline.config.engine import EngineConfig, option_names
from shardline.config.experts import ExpertBalancing
from shardline.config.fields import format_bytes, parse_bytes, parse_count
from shardline.config.topology import RankGrid


def test_every_option_lands_where_it_belongs() -> None:
    config = EngineConfig.from_options(model="x", tensor_parallel_size=3, block_size=32, max_num_seqs=5)
    assert config.model.model == "x"
    assert config.parallel.tensor_parallel_size == 3
    assert config.cache.block_size == 32
    assert config.scheduler.max_num_seqs == 5
    assert len(option_names()) == len(set(option_names()))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("tensor_parallel", 2, "unknown option"),
        ("tensor_parallel_size", 0, "at least 1"),
        ("max_num_seqs", 10**8, "at most 65536"),
        ("tensor_parallel_size", "2", "whole number"),
        ("numerics", "sloppy", "exact, fast"),
        ("dtype", "int3", "bfloat16"),
        ("quantization", "int3", "none, fp8, fp8_w8a8, int4, int4_fast, int8, int8_fast, int8_w8a16"),
        ("quantization", "w4a16", "now the format 'packed'"),
        ("gpu_memory_utilization", 1.5, "(0, 1]"),
        ("kv_cache_memory", "4 parsecs", "4GiB"),
        ("max_model_len", "long", "auto"),
        ("enable_eplb", True, "needs enable_expert_parallel"),
        ("eplb_config", "{}", "needs enable_eplb"),
        ("step_timeout", 0.0, "(0, 86400.0]"),
        ("step_timeout", float("nan"), "(0, 86400.0]"),
        ("step_timeout", float("inf"), "(0, 86400.0]"),
        ("cpu_threads", -1, "at least 1"),
        ("seed", 2**70, "64 bits"),
    ],
)
def test_mistakes_are_told(option: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        EngineConfig.from_options(**{option: value})


@pytest.mark.parametrize(
    ("text", "count"), [("4GiB", 4 << 30), ("4G", 4 * 10**9), ("1.5Ki", 1536), ("512 MiB", 512 << 20), ("77", 77)]
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_sizes_are_shown_in_binary_units() -> None:
    assert format_bytes(3 << 20) == "3.00 MiB"
    assert format_bytes(512) == "512 B"


@pytest.mark.parametrize(("tensor", "pipeline", "data"), list(itertools.product((1, 2, 3), (1, 2, 4), (1, 3))))
def test_grid(tensor: int, pipeline: int, data: int) -> None:
    grid = RankGrid(tensor, pipeline, data=data)
    places = [grid.place(rank) for rank in range(grid.world_size)]
    assert len({(place.dp_rank, place.pp_rank, place.tp_rank) for place in places}) == tensor * pipeline * data
    for place in places:
        assert place.peers("tensor")[place.tp_rank] == place.rank
        assert place.peers("expert")[place.dp_rank * tensor + place.tp_rank] == place.rank
        assert [grid.place(peer).pp_rank for peer in place.peers("expert")] == [place.pp_rank] * data * tensor
        assert (place.previous_stage is None) == (place.pp_rank == 0)
        if place.next_stage is not None:
            successor = grid.place(place.next_stage)
            assert successor.dp_rank == place.dp_rank
            assert (successor.pp_rank, successor.tp_rank) == (place.pp_rank + 1, place.tp_rank)
            assert successor.previous_stage == place.rank
    drivers = [grid.place(driver) for driver in grid.drivers]
    assert [(driver.dp_rank, driver.pp_rank, driver.tp_rank) for driver in drivers] == [
        (replica, pipeline - 1, 0) for replica in range(data)
    ]
    with pytest.raises(ValueError, match="outside"):
        grid.place(grid.world_size)


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("10k", 10_000), ("25.6k", 25_600), ("2K", 2048), ("1M", 1 << 20), ("1m", 1_000_000)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count
    assert EngineConfig.from_options(max_model_len=text).model.max_model_len == count


def test_lengths_that_are_none() -> None:
    assert EngineConfig.from_options(max_model_len=-1).model.max_model_len == "auto"
    for text in ("1.5K", "k", "10kb", ""):
        with pytest.raises(ValueError, match="max_model_len must be a positive number of tokens"):
            EngineConfig.from_options(max_model_len=text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "a JSON object like"),
        ('{"window": 3}', "unknown key 'window'; known: window_size"),
        ('{"window_size": 0}', "window_size of eplb_config must be a whole number from 1 to 1,073,741,824, got 0"),
        ('{"step_interval": 1.5}', "step_interval of eplb_config must be a whole number from 1 to 1,073,741,824"),
        ('{"num_redundant_experts": -1}', "from 0 to"),
    ],
)
def test_how_experts_move_is_checked(text: str, says: str) -> None:
    options = {"enable_expert_parallel": True, "enable_eplb": True}
    with pytest.raises(ValueError, match=re.escape(says)):
        EngineConfig.from_options(**options, eplb_config=text)
    config = EngineConfig.from_options(**options, eplb_config='{"step_interval": 7}')
    assert config.parallel.expert_balancing == ExpertBalancing(step_interval=7)
    assert EngineConfig.from_options(enable_expert_parallel=True).parallel.expert_balancing.step_interval == 0
