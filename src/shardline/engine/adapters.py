"""Which adapter (LoRA) is in which slot of the ranks, and the sequences that wait for one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

import msgspec

from shardline.engine.commands import Give
from shardline.engine.scheduling.scheduler import Scheduler
from shardline.engine.scheduling.sequence import LiveSequence, State
from shardline.messages.adapters import LoadAdapter, LookAtAdapter
from shardline.messages.control import ControlDone
from shardline.messages.request import AdapterRef


@dataclass
class _Slot:
    number: int
    adapter: AdapterRef
    is_loaded: bool = False
    users: list[tuple[Scheduler, LiveSequence]] = field(default_factory=list)
    """The sequences that have not ended."""


class AdapterSlots:
    """The adapters that the ranks of an engine hold. The least recently used one that no sequence needs goes first.

    Sequences whose adapter is not there are parked until all ranks have loaded it; other sequences go on meanwhile.
    """

    def __init__(self, num_slots: int, give: Give) -> None:
        """`give`: see `RankCommands.give`."""
        self._give_command = give
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        """By digest; the least recently used one first."""
        self._waiting: list[tuple[Scheduler, LiveSequence]] = []
        """Those that need a slot, in their order."""

    def begin(self, scheduler: Scheduler, sequence: LiveSequence) -> None:
        """Note a sequence with an adapter that has just been added; it is parked."""
        self._waiting.append((scheduler, sequence))
        self.settle()

    def settle(self) -> None:
        """Give slots to sequences that wait, as far as adapters are there that no sequence needs."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for scheduler, sequence in waiting:
            if sequence.state is not State.FINISHED and not self._place(scheduler, sequence):
                self._waiting.append((scheduler, sequence))

    def _look(self, slot: _Slot, begun: ControlDone) -> None:
        """Ask the ranks whether a load is over."""
        assert not begun.error, begun.error
        self._give_command(LookAtAdapter(slot.number), partial(self._note_load, slot))

    def _note_load(self, slot: _Slot, done: ControlDone) -> None:
        """Note whether all ranks have loaded an adapter. Those that refuse it refuse it for good."""
        if not done.error and not all(msgspec.msgpack.decode(value, type=bool) for value in done.values):
            self._look(slot, done)
        elif not done.error:
            slot.is_loaded = True
            for scheduler, sequence in slot.users:
                self._give(scheduler, sequence, slot)
        else:
            del self._slots[slot.adapter.digest]
            self._free.append(slot.number)
            for scheduler, sequence in slot.users:
                if sequence.state is not State.FINISHED:
                    scheduler.queues.leave(sequence, State.FINISHED)
                    scheduler.registry.finish_sequence(sequence, "error", done.error)

    def _place(self, scheduler: Scheduler, sequence: LiveSequence) -> bool:
        """Whether the sequence's adapter has a slot, or has one from now on."""
        adapter = sequence.request.adapter
        assert adapter is not None
        slot = self._slots.get(adapter.digest)
        if slot is None:
            number = self._take_number()
            if number is None:
                return False
            slot = self._slots[adapter.digest] = _Slot(number, adapter)
            slot.users.append((scheduler, sequence))
            self._give_command(LoadAdapter(number, adapter), partial(self._look, slot))
            return True
        self._slots.move_to_end(adapter.digest)
        slot.users.append((scheduler, sequence))
        if slot.is_loaded:
            self._give(scheduler, sequence, slot)
        return True

    def _give(self, scheduler: Scheduler, sequence: LiveSequence, slot: _Slot) -> None:
        if sequence.state is not State.FINISHED:
            scheduler.queues.give_adapter(sequence, slot.number)

    def _take_number(self) -> int | None:
        """A slot that is empty from now on; None: sequences need all of them."""
        if self._free:
            return self._free.pop()
        for digest, slot in self._slots.items():
            slot.users = [user for user in slot.users if user[1].state is not State.FINISHED]
            if slot.is_loaded and not slot.users:
                del self._slots[digest]
                return slot.number
        return None
