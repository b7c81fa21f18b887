"""KV cache events in vLLM's form: which blocks of tokens an engine's cache holds, for routers that follow it.

A message has three frames: topic, number (8 bytes, big-endian; each engine counts from 0) and a batch in msgpack.
"""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec

BlockHash = int | bytes
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""In place of a number, behind the last batch that is sent again."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Consecutive blocks of one sequence can be found in the cache."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """The block before the first one; None: it is the sequence's first."""
    token_ids: list[int]
    """Of all blocks."""
    block_size: int
    lora_id: int | None
    medium: str | None
    """The kind of memory, GPU for the first tier."""
    lora_name: str | None
    extra_keys: list[Any] | None = None
    """For each block what it depends on beside tokens, such as a salt; None: nothing."""
    group_idx: int | None = None
    """The KV group."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks have left the cache."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step, in their order."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_TYPES: dict[Any, type[msgspec.Struct]] = {one.__name__: one for one in (BlockStored, BlockRemoved, AllBlocksCleared)}


def read_batch(payload: bytes) -> KVEventBatch:
    """A batch of any engine: events are maps with `type`, or arrays that begin with it, as vLLM had them before.

    Events of other types are left out, as are fields that are not known here.

    Raises:
        ValueError: it is no batch of events.
    """
    try:
        ts, events, *rest = msgspec.msgpack.decode(payload)
        rank = msgspec.convert(rest[0], int | None) if rest else None
        read = [event for fields in events if (event := _read_event(fields)) is not None]
        return KVEventBatch(msgspec.convert(ts, float), read, rank)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"this is no batch of KV events: {reprlib.repr(payload)} ({error})") from None


def _read_event(fields: Any) -> KVEvent | None:
    values = dict(fields) if isinstance(fields, dict) else None
    kind = _TYPES.get(values.pop("type", None) if values is not None else fields[0])
    if kind is None:
        return None
    if values is None:
        values = dict(zip(kind.__struct_fields__, fields[1:], strict=False))
    # Older engines have fewer fields.
    absent = {name: None for name in ("lora_id", "medium", "lora_name") if name in kind.__struct_fields__}
    event: KVEvent = msgspec.convert({"type": kind.__name__, **absent, **values}, kind)  # type: ignore[assignment]
    return event
