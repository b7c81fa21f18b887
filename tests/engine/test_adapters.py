"""Slots of adapters: who waits, what is loaded when, and what goes first."""

from __future__ import annotations

import msgspec

from shardline.engine.adapters import AdapterSlots
from shardline.engine.commands import Answered
from shardline.engine.scheduling.sequence import LiveSequence, State
from shardline.messages.adapters import LoadAdapter, LookAtAdapter
from shardline.messages.control import Command, ControlDone
from shardline.messages.request import AdapterRef, Request
from shardline.sampling_params import SamplingParams
from tests.engine.harness import Engine, Shape

NOTHING = msgspec.msgpack.encode(None)


class Ranks:
    """Answers loads when it is told to."""

    def __init__(self, num_slots: int) -> None:
        self.scheduler = Engine(Shape()).scheduler
        self.loads: list[tuple[Answered, int, str]] = []
        """Who waits for the answer, the slot and the adapter."""
        self.looks: list[Answered] = []
        self.slots = AdapterSlots(num_slots, self.take)
        self.count = 0

    def take(self, command: Command, answered: Answered) -> None:
        if isinstance(command, LookAtAdapter):
            self.looks.append(answered)
            return
        assert isinstance(command, LoadAdapter)
        self.loads.append((answered, command.slot, command.adapter.digest))
        answered(ControlDone(-1, (NOTHING, NOTHING)))

    def add(self, digest: str) -> LiveSequence:
        self.count += 1
        sampling = SamplingParams(max_tokens=1, seed=0)
        request = Request(
            request_id=str(self.count), prompt_token_ids=[1], sampling=sampling, adapter=AdapterRef(digest, "")
        )
        sequence = self.scheduler.add_request(request, 0.0)
        assert sequence is not None
        assert sequence.state is State.PARKED
        self.slots.begin(self.scheduler, sequence)
        return sequence

    def answer(self, error: str = "") -> None:
        """All ranks have done the last load; one of them is a little later than the other."""
        for other in (False, True):
            values = () if error else tuple(map(msgspec.msgpack.encode, (True, other)))
            self.looks[-1](ControlDone(-1, values, error))
            if error:
                return

    def end(self, sequence: LiveSequence) -> None:
        self.scheduler.abort_requests([sequence.request.request_id])
        self.slots.settle()


def test_sequences_wait_for_their_adapter_and_share_it() -> None:
    ranks = Ranks(2)
    first, second = ranks.add("a"), ranks.add("a")
    assert [load[2] for load in ranks.loads] == ["a"]
    assert {one.state for one in (first, second)} == {State.PARKED}
    ranks.answer()
    third = ranks.add("a")
    assert len(ranks.loads) == 1
    assert {one.adapter_slot for one in (first, second, third)} == {ranks.loads[0][1]}
    assert {one.state for one in (first, second, third)} == {State.WAITING}


def test_the_least_recently_used_adapter_that_is_free_goes_first() -> None:
    ranks = Ranks(2)
    a, b = ranks.add("a"), None
    ranks.answer()
    b = ranks.add("b")
    ranks.answer()
    c = ranks.add("c")
    assert len(ranks.loads) == 2, "both slots are in use"
    assert c.state is State.PARKED
    ranks.end(a)
    assert ranks.loads[2][1:] == (ranks.loads[0][1], "c"), "in the place of a"
    ranks.answer()
    assert {c.state} == {State.WAITING}
    ranks.end(b)
    ranks.end(c)
    ranks.end(ranks.add("b"))
    d = ranks.add("d")
    assert ranks.loads[3][1:] == (ranks.loads[2][1], "d"), "b was used after c"
    ranks.answer()
    assert d.adapter_slot == ranks.loads[2][1]


def test_an_adapter_that_cannot_be_loaded_fails_those_that_need_it() -> None:
    ranks = Ranks(1)
    bad, other = ranks.add("bad"), ranks.add("good")
    assert len(ranks.loads) == 1
    ranks.answer("no such folder")
    assert bad.state is State.FINISHED
    [output] = ranks.scheduler.take_outputs()
    assert (output.error, output.refused, output.finish_reason) == ("no such folder", True, "error")
    ranks.slots.settle()
    assert ranks.loads[1][2] == "good"
    ranks.answer()
    assert other.state is State.WAITING


def test_a_request_that_is_cancelled_while_its_adapter_loads() -> None:
    ranks = Ranks(1)
    gone, other = ranks.add("a"), ranks.add("b")
    ranks.end(gone)
    assert len(ranks.loads) == 1, "a slot is not given away while ranks load into it"
    ranks.answer()
    assert gone.state is State.FINISHED
    ranks.slots.settle()
    assert ranks.loads[1][2] == "b"
    ranks.answer()
    assert other.state is State.WAITING
