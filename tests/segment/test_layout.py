"""A host's segment holds what its ranks share, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from shardline.config.topology import RankGrid
from shardline.segment.layout import SegmentLayout


def make(grid: RankGrid, ranks: tuple[int, ...]) -> tuple[SegmentLayout, memoryview]:
    layout = SegmentLayout(grid, ranks, num_layers=2, num_experts=3, kv_bytes=(100,) * grid.pipeline)
    return layout, memoryview(bytearray(layout.num_bytes))


def test_a_group_that_reaches_another_host_has_no_area() -> None:
    grid = RankGrid(tensor=2, pipeline=2, data=2)
    everything = tuple(range(8))
    for ranks in (everything, (0, 1, 2, 3), (1, 2, 3), (0, 1, 4, 5)):
        layout, segment = make(grid, ranks)
        for rank in ranks:
            place = grid.place(rank)
            is_whole = set(place.peers("tensor")) <= set(ranks)
            assert (layout.group(segment, place, "tensor") is not None) == is_whole
            assert (layout.kv_pool(segment, place) is not None) == is_whole
            assert (layout.group(segment, place, "expert") is not None) == (set(place.peers("expert")) <= set(ranks))
            assert (layout.link(segment, rank) is not None) == (place.next_stage in ranks)


def test_parts_do_not_overlap() -> None:
    grid = RankGrid(tensor=2, pipeline=2, data=2)
    layout, segment = make(grid, (0, 1, 2, 3, 6, 7))
    for number, rank in enumerate(layout.ranks, start=1):
        place = grid.place(rank)
        layout.progress(segment).line(rank).finish(100 * number)
        layout.expert_load(segment).of_rank(rank)[:] = number
        parts: tuple[Callable[..., Any], ...] = (partial(layout.group, axis="tensor"), layout.kv_pool)
        for code, part in enumerate(parts, start=1):
            area = part(segment, place)
            assert area is not None
            area[0] = area[-1] = 10 * code + place.peers("tensor")[0]
        if (link := layout.link(segment, rank)) is not None:
            link[0] = link[-1] = 100 + rank
    assert [line.finished for line in layout.progress(segment).read()] == [100 * n + 1 for n in range(1, 7)]
    assert (layout.expert_load(segment).total() == 21).all()
    for rank, (code, part) in itertools.product(layout.ranks, enumerate(parts, start=1)):
        area = part(segment, grid.place(rank))
        assert area is not None
        assert area[0] == area[-1] == 10 * code + grid.place(rank).peers("tensor")[0]
    link = layout.link(segment, 1)
    assert link is not None
    assert link[0] == link[-1] == 101
