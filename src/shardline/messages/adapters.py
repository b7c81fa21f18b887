"""The commands that bring an adapter to the ranks, which load it beside the steps."""

from __future__ import annotations

from shardline.messages.control import Command
from shardline.messages.request import AdapterRef


class LoadAdapter(Command, frozen=True):
    """Begin to put an adapter into a slot, in place of the one that is there. No step may read the slot meanwhile."""

    slot: int
    adapter: AdapterRef


class LookAtAdapter(Command, frozen=True):
    """Say whether the load into a slot is over, as a bool. If the rank refuses the adapter, the slot is empty, and so
    this is refused."""

    slot: int
