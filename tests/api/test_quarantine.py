"""Suspects go on alone: whatever hostile requests do and in whatever order things happen, nobody else is touched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from shardline.api.engines import EngineEvent, EngineRestarted
from shardline.api.failover import RestartLimit, ran_at
from shardline.api.quarantine import CLEARED_AFTER, Quarantine, ReplicaState, RunningChoice
from shardline.api.replicas import Replicas
from shardline.config.engine import EngineConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.engine import EngineFailed, EngineOutputs, EngineReady
from shardline.messages.request import FinishReason, Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.sampling_params import SamplingParams
from tests.api.fake_engine import next_token

NUM_TOKENS = 60


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=[ord(name[0])] * 3, sampling=SamplingParams(max_tokens=NUM_TOKENS))


class Engine:
    """A replica that acts only when it is told to: it reads what was sent, and steps, or hangs in a step."""

    def __init__(self, hangs_at: dict[str, set[int]], hangs_once: bool) -> None:
        self.hangs_at, self.hangs_once = hangs_at, hangs_once
        self.inbox: list[tuple[str, list[Request] | list[str]]] = []
        self.running: dict[str, tuple[Request, int]] = {}
        self.hangs = False

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return EngineReady(64, 16, NumericContract("fake"), 25.0, [])

    def add(self, requests: Sequence[Request]) -> None:
        self.inbox.append(("add", list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        self.inbox.append(("abort", list(request_ids)))

    def reset_prefix_cache(self) -> None:
        raise AssertionError

    def close(self, timeout: float = 10.0) -> None:
        pass

    def step(self) -> list[EngineOutputs]:
        """Read messages and give every request a token; nothing, if one of them hangs here."""
        answers = []
        inbox, self.inbox = self.inbox, []
        for kind, items in inbox:
            if kind == "add":
                for one in items:
                    assert isinstance(one, Request)
                    assert one.request_id not in self.running
                    self.running[one.request_id] = (one, len(one.output_token_ids))
            else:
                for name in items:
                    assert isinstance(name, str)
                    self.running.pop(name, None)
                answers.append(EngineOutputs([], EngineStats(), [str(name) for name in items]))
        for name, (_, position) in self.running.items():
            if position in self.hangs_at.get(name, ()):
                self.hangs = True
                if self.hangs_once:
                    self.hangs_at[name].discard(position)
        if self.hangs:
            return answers
        outputs = []
        for name, (one, position) in list(self.running.items()):
            self.running[name] = (one, position + 1)
            reason: FinishReason | None = None
            if position + 1 == NUM_TOKENS:
                del self.running[name]
                reason = "length"
            outputs.append(SequenceOutput(name, [next_token(one, position)], finish_reason=reason))
        return [*answers, EngineOutputs(outputs, EngineStats())] if outputs else answers


class World:
    """Replicas whose engines, failures and restarts are driven one by one; it checks what must hold at every moment."""

    def __init__(self, count: int, chooser: random.Random, *, hangs_once: bool = False) -> None:
        """`hangs_once`: a hostile request hangs at each of its positions once, else always."""
        self.random = chooser
        self.hangs_once = hangs_once
        self.hangs_at: dict[str, set[int]] = {}
        self.hostile: set[str] = set()
        self.engines: list[Engine] = []
        self.starting: list[int] = []
        self.messages: list[list[EngineOutputs]] = [[] for _ in range(count)]
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.losses = 0
        config = EngineConfig.from_options(data_parallel_size=count)
        self.replicas = Replicas(config, lambda *event: None, self.connect)
        self.replicas.wait_ready()
        self.replicas._engines.restart_engine = lambda index, failed: self.starting.append(index)  # type: ignore[method-assign]

    def connect(self, config: EngineConfig, index: int, on_event: Callable[[EngineEvent], None]) -> Engine:
        self.engines.append(Engine(self.hangs_at, self.hangs_once))
        return self.engines[-1]

    def ask(self, name: str, hangs_at: Iterable[int] = ()) -> None:
        if hangs_at:
            self.hangs_at[name] = set(hangs_at)
            self.hostile.add(name)
        self.requests[name] = one = request(name)
        self.tokens[name] = []
        self.replicas.add_requests([one], bounded=False)
        self.check()

    def handle(self, index: int, event: EngineEvent) -> None:
        for output in self.replicas.handle_event(index, event):
            assert output.request_id not in self.ended, "an output follows the last one"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        self.check()

    def act(self) -> None:
        """One thing that may happen now."""
        index = self.random.randrange(len(self.messages))
        engine = self.engines[index]
        if index in self.starting:
            if self.random.random() < 0.3:
                self.starting.remove(index)
                self.engines[index] = Engine(self.hangs_at, self.hangs_once)
                self.messages[index] = []
                self.handle(index, EngineRestarted(self.engines[index]))
        elif engine.hangs and self.random.random() < 0.3 and not self.messages[index]:
            self.losses += 1
            self.handle(index, EngineFailed("it hangs", suspicious=True))
        elif self.messages[index] and self.random.random() < 0.7:
            self.handle(index, self.messages[index].pop(0))
        elif not engine.hangs:
            self.messages[index] += engine.step()

    def abort(self) -> None:
        name = self.random.choice([*self.tokens])
        if name not in self.ended:
            self.ended[name] = "abort"
            self.replicas.abort_requests([name])
            self.check()

    def check(self) -> None:
        replicas = self.replicas
        homes = [name for replica in replicas._replicas for name in replica.in_flight]
        placement = replicas._placement
        waiting = [*placement._unplaced, *placement.quarantine.suspects]
        assert len({*homes, *waiting}) == len(homes) + len(waiting), "a choice is in two places"
        assert {*homes, *waiting} == {*self.tokens} - {*self.ended}, "a choice is lost"
        assert len(homes) == len(placement._replica_of)
        closed, alone = placement.quarantine.replica, placement.quarantine.alone
        for index, replica in enumerate(replicas._replicas):
            assert replica.tokens == sum(3 + NUM_TOKENS for _ in replica.in_flight)
            if index == closed and alone is not None:
                assert [*replica.in_flight] == [alone.request.request_id]
            assert not replica.failed or not replica.in_flight

    def run(self) -> None:
        """Until all requests have ended."""
        for _ in range(20_000):
            if len(self.ended) == len(self.tokens):
                return
            self.act()
        raise AssertionError("it goes on for ever")

    def check_answers(self) -> None:
        for name, tokens in self.tokens.items():
            expected = [next_token(self.requests[name], position) for position in range(NUM_TOKENS)]
            assert tokens == expected[: len(tokens)]
            if name not in self.hostile and self.ended[name] != "abort":
                assert (self.ended[name], len(tokens)) == ("length", NUM_TOKENS)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_a_request_that_hangs_an_engine_ends_and_nobody_else_is_touched(count: int, seed: int) -> None:
    chooser = random.Random(100 * count + seed)
    world = World(count, chooser, hangs_once=False)
    for number in range(12):
        is_hostile = number in (3, 4, 8)
        world.ask(f"{'abcdefghijkl'[number]}{number}", {chooser.choice([0, 1, 7, 30])} if is_hostile else ())
        for _ in range(chooser.randrange(40)):
            world.act()
        if seed % 2 and chooser.random() < 0.2:
            world.abort()
    world.run()
    world.check_answers()
    for name in world.hostile:
        assert world.ended[name] in ("error", "abort")
    # Once together with others and once alone; those losses are not the replicas' fault.
    assert world.losses <= 2 * len(world.hostile)
    assert not world.replicas.dead_reason


@pytest.mark.parametrize("seed", range(20))
def test_a_request_that_hangs_now_and_then_ends_too(seed: int) -> None:
    """It is cleared each time, but needs four times as many tokens for that."""
    world = World(2, random.Random(seed), hangs_once=True)
    world.ask("hostile", range(0, NUM_TOKENS, CLEARED_AFTER + 3))
    for name in "abcd":
        world.ask(name)
    world.run()
    world.check_answers()
    assert world.ended["hostile"] == "error"
    assert world.losses == 3


def test_innocent_suspects_are_cleared_one_by_one_while_everybody_else_waits_at_most_a_moment() -> None:
    world = World(1, random.Random(0))
    names = [f"{chr(97 + number % 26)}{number}" for number in range(30)]
    for name in names:
        world.ask(name)
    world.messages[0] += world.engines[0].step()
    world.handle(0, EngineFailed("it hangs", suspicious=True))
    world.starting.clear()
    world.engines[0] = Engine({}, hangs_once=False)
    world.messages[0] = []
    world.handle(0, EngineRestarted(world.engines[0]))
    world.ask("new")
    steps = 0
    while world.replicas._placement.quarantine.replica is not None:
        assert not world.tokens["new"]
        steps += 1
        for message in world.engines[0].step():
            world.handle(0, message)
    # A step more for each, until its engine has given it back.
    assert steps <= len(names) * (CLEARED_AFTER + 1)
    world.run()
    world.check_answers()
    assert not world.hostile
    assert {*world.ended.values()} == {"length"}


def test_the_last_running_replica_is_not_put_in_quarantine_if_another_one_comes() -> None:
    def chosen(*replicas: ReplicaState) -> int | None:
        quarantine = Quarantine()
        quarantine.add(RunningChoice(request("a")))
        quarantine.settle(replicas)
        return quarantine.replica

    down, starting = ReplicaState(False, False, 0), ReplicaState(False, True, 0)
    idle, busy = ReplicaState(True, False, 0), ReplicaState(True, False, 5)
    assert chosen(starting, busy) is None
    assert chosen(starting, idle) is None
    assert chosen(idle, busy) == 0
    assert chosen(starting, busy, idle) == 2
    assert chosen(starting, busy, busy) is None
    assert chosen(idle) == 0
    assert chosen(down, busy) == 1  # its choices leave, and wait
    assert chosen(down, down) is None
    assert chosen(down, busy, ReplicaState(True, False, 4)) == 2


def test_requests_that_came_after_the_stall_are_no_suspects() -> None:
    def ran(stalled_at: float, *sent: float) -> list[float]:
        return [
            choice.sent_at for choice in ran_at([RunningChoice(request("a"), sent_at=at) for at in sent], stalled_at)
        ]

    assert ran(100.0, 50.0, 99.0, 100.2, 103.0) == [50.0, 99.0, 100.2]
    assert ran(100.0, 104.0, 104.1, 106.0) == [104.0, 104.1], "the engine was idle: the first one made it hang"
    assert ran(100.0) == []


def test_a_restart_that_a_request_made_necessary_is_not_counted() -> None:
    limit = RestartLimit(2, lambda: 0.0)
    limit.forgive()
    for _ in range(5):
        assert limit.allow_restart()
        limit.forgive()
    assert [limit.allow_restart() for _ in range(3)] == [True, True, False]


def test_hostile_requests_do_not_use_up_the_restarts() -> None:
    world = World(1, random.Random(0))
    for number in range(8):
        world.ask(f"h{number}", {number})
        world.run()
    world.ask("innocent")
    world.run()
    world.check_answers()
    assert world.losses == 16


def test_a_choice_leaves_when_its_engine_says_so_and_keeps_what_came_before() -> None:
    """Else the same tokens could come again, or twice, from an engine that has not read the message yet."""
    world = World(1, random.Random(0))
    for name in "ab":
        world.ask(name)
    world.handle(0, EngineFailed("it hangs", suspicious=True))
    world.engines[0] = engine = Engine({}, hangs_once=False)
    world.handle(0, EngineRestarted(engine))
    for _ in range(CLEARED_AFTER):
        for message in engine.step():
            world.handle(0, message)
    assert engine.inbox == [("abort", ["a"])]
    world.handle(
        0, EngineOutputs([SequenceOutput("a", [next_token(world.requests["a"], CLEARED_AFTER)])], EngineStats())
    )
    assert len(world.tokens["a"]) == CLEARED_AFTER + 1
    assert [kind for kind, _ in engine.inbox] == ["abort"]
    world.handle(0, EngineOutputs([], EngineStats(), ["a"]))
    assert [kind for kind, _ in engine.inbox] == ["abort", "add"]
    del engine.running["a"]
    world.starting.clear()
    world.run()
    world.check_answers()
