"""What steps make of a prompt's tokens, collected in the engine."""

from __future__ import annotations

import pytest

from shardline.api.pooling import PoolingTask, pooling_request
from shardline.engine.kv_cache import KVCache
from shardline.engine.scheduling.registry import RequestRegistry
from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.messages.request import Request
from shardline.models.kv_groups import KVGroup

PROMPT = [5, 6, 7, 8, 9]


def sequence(task: PoolingTask) -> LiveSequence:
    request = Request(request_id="r", prompt_token_ids=PROMPT, sampling=pooling_request(task))
    return LiveSequence(request, 6, (0, 0.0, 0), list(PROMPT), KVState([[]], [0]))


def rows(start: int, end: int) -> bytes:
    """Two bytes for each position."""
    return b"".join(bytes([position, 10 + position]) for position in range(start, end))


def test_only_the_last_position_counts() -> None:
    cache = KVCache([KVGroup((0,), None)], 9, 16, prefix_caching=False)
    registry = RequestRegistry(cache, max_model_len=9)
    one = registry.add_request(sequence("embed").request)
    assert one is not None
    assert one.report is None
    assert registry.finish_embedding(one, rows(4, 5)).embedding == rows(4, 5)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_every_position_counts_once(first: int) -> None:
    one = sequence("token_embed")
    assert one.report is not None
    assert one.report.asks(0, first)
    one.report.append_embeddings(first, first, rows(0, first))
    # It lost its blocks, and computes its prompt again from its second token on.
    one.forget_computed()
    assert not one.report.asks(1, first)
    if first + 1 < len(PROMPT):
        assert one.report.asks(1, 5)
        one.report.append_embeddings(5, 4, rows(1, 5))
    else:
        assert not one.report.asks(1, 5)  # the step that samples reports its last position anyway
        one.report.append_embeddings(5, 1, rows(4, 5))
    assert one.report.embedding == rows(0, 5)
