"""The command that brings an adapter to the ranks."""

from __future__ import annotations

from shardline.messages.control import Command
from shardline.messages.request import AdapterRef


class LoadAdapter(Command, frozen=True):
    """Put an adapter into a slot, in place of the one that is there. If a rank refuses, the slot is empty."""

    slot: int
    adapter: AdapterRef
