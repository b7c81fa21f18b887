"""Hash chains, and the longest usable hit against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.engine.prefixes import BlockHasher, cache_namespace, longest_hit, num_window_blocks
from shardline.models.kv_groups import KVGroup

NAMESPACE = cache_namespace("weights", b"secret")


def chain(hasher: BlockHasher, tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, salt, tokens, len(tokens) // 2)
    return hashes


def test_a_block_is_named_by_all_tokens_before_it() -> None:
    hasher = BlockHasher(2, NAMESPACE)
    first, second = chain(hasher, [1, 2, 3, 4]), chain(hasher, [1, 2, 3, 5])
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert chain(hasher, [9, 2, 3, 4])[1] != first[1]
    assert chain(hasher, [3, 4])[0] != first[1]


def test_salt_weights_and_secret_set_chains_apart() -> None:
    hasher, tokens = BlockHasher(2, NAMESPACE), [1, 2]
    assert chain(hasher, tokens) == chain(BlockHasher(2, cache_namespace("weights", b"secret")), tokens)
    assert chain(hasher, tokens) != chain(hasher, tokens, "salt")
    for other in (cache_namespace("others", b"secret"), cache_namespace("weights", b"another")):
        assert chain(hasher, tokens) != chain(BlockHasher(2, other), tokens)


def test_a_reset_sets_chains_apart_in_all_engines_alike() -> None:
    hasher, tokens = BlockHasher(2, NAMESPACE), [1, 2]
    reset, again = hasher.successor(), hasher.successor().successor()
    assert len({*chain(hasher, tokens), *chain(reset, tokens), *chain(again, tokens)}) == 3
    assert chain(reset, tokens) == chain(BlockHasher(2, NAMESPACE).successor(), tokens)


def test_chains_grow_and_take_any_token_and_salt() -> None:
    hasher = BlockHasher(2, NAMESPACE)
    tokens = [2**40, -1, 3, 4, 5, 6]
    hashes = chain(hasher, tokens[:2], "\ud800")
    hasher.extend(hashes, "\ud800", tokens, 3)
    assert hashes == chain(hasher, tokens, "\ud800")
    hasher.extend(hashes, "\ud800", tokens, 1)
    assert len(hashes) == 3


def sees(window: int | None, position: int) -> range:
    """The positions before `position` that the token there sees."""
    return range(0 if window is None else max(0, position - window + 1), position)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(1, 14)), min_size=1, max_size=3),
    st.sampled_from([1, 3, 4]),
    st.lists(st.sets(st.integers(0, 9)), min_size=3, max_size=3),
    st.booleans(),
)
def test_longest_hit(windows: list[int | None], size: int, absent: list[set[int]], mostly_full: bool) -> None:
    groups = [KVGroup((index,), window) for index, window in enumerate(windows)]
    if mostly_full:
        absent = [set(list(blocks)[:1]) for blocks in absent]

    def usable(length: int) -> bool:
        return all(
            position // size not in absent[index]
            for index, group in enumerate(groups)
            for position in sees(group.window, length * size)
        )

    expected = max(length for length in range(11) if usable(length))
    assert longest_hit(groups, size, 10, lambda group, block: block not in absent[group]) == expected


def test_num_window_blocks() -> None:
    assert [num_window_blocks(window, 4) for window in (1, 2, 5, 6, 9)] == [0, 1, 1, 2, 2]
