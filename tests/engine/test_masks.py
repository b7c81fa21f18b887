"""Masks come from workers: whatever a grammar does there, other sequences get theirs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.engine.masks import lanes as lanes_module
from shardline.engine.masks import service as service_module
from shardline.engine.masks.lanes import MaskLanes
from shardline.engine.masks.service import MaskAnswer, MaskJob, open_service
from shardline.sampling_params import StructuredOutputsParams
from shardline.structured.compiler import GrammarCompiler
from shardline.structured.grammar import schema_grammar, structured_grammar

pytestmark = pytest.mark.slow  # workers are processes

TOKENIZER_FILE = Path(DEMO_FOLDER) / "tokenizer.json"
TOKENIZER = tokenizers.Tokenizer.from_file(str(TOKENIZER_FILE))
EOS = 2
HOSTILE = schema_grammar({"type": "integer", "multipleOf": 999_983})


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch) -> None:
    monkeypatch.setattr(lanes_module, "JOB_SECONDS", 0.6)
    monkeypatch.setattr(lanes_module, "_WALL_FACTOR", 100.0)  # tests share the cores


@pytest.fixture
def lanes() -> Iterator[MaskLanes]:
    with contextlib.closing(MaskLanes(str(TOKENIZER_FILE))) as made:
        yield made


DEEP_RULES = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(30_000)) + '\nr30000: "a"'
DEEP = json.dumps({"grammars": [{"lark_grammar": DEEP_RULES}]})


def regex(pattern: str) -> str:
    return structured_grammar(StructuredOutputsParams(regex=pattern))


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def collect(lanes: MaskLanes, count: int = 1, seconds: float = 30.0) -> dict[int, MaskAnswer]:
    """This many answers by key."""
    found: dict[int, MaskAnswer] = {}
    deadline = time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {sorted(found)} were answered"
        found.update(lanes.collect(0.1))
    return found


def allowed(answer: MaskAnswer) -> set[int]:
    assert not answer.error
    words = np.frombuffer(answer.words, dtype=np.uint32)
    return {32 * word + bit for word in range(len(words)) for bit in range(32) if words[word] >> np.uint32(bit) & 1}


def expected(grammar: str, output: Sequence[int]) -> set[int]:
    """What a matcher in this process allows."""
    matcher = GrammarCompiler(TOKENIZER_FILE.read_bytes()).start_grammar(grammar)
    for token_id in output:
        matcher.append_token(token_id, is_end=False)
    words, may_end = matcher.find_allowed()
    return allowed(MaskAnswer(words.tobytes())) | ({EOS} if may_end else set())


def workers_of(lanes: MaskLanes) -> list[int]:
    """The process ids of all workers that have begun."""
    return [lane.worker.pid for lane in lanes._lanes() if lane.worker.pid]


def test_masks_follow_each_sequence(lanes):
    grammar, output = regex("(ab|c){2,9}d"), encode("abc")
    lanes.start(0, grammar, (EOS,), [])
    lanes.start(1, grammar, (EOS,), output)
    first = collect(lanes, 2)
    assert allowed(first[0]) == expected(grammar, [])
    assert allowed(first[1]) == expected(grammar, output)
    lanes.advance(0, output)
    assert allowed(collect(lanes)[0]) == expected(grammar, output)
    lanes.advance(0, encode("d"))
    last = collect(lanes)[0]
    assert last == MaskAnswer(finished=True, seconds=last.seconds)
    assert last.seconds == pytest.approx(0, abs=1)


def split_masks(answer: MaskAnswer) -> list[set[int]]:
    count = 1 + len(answer.guesses)
    size = len(answer.words) // count
    return [allowed(MaskAnswer(answer.words[row * size : (row + 1) * size])) for row in range(count)]


@pytest.mark.parametrize(
    ("guesses", "num_allowed"),
    [("cab", 3), ("cabx", 3), ("xab", 0), ("cabcd", 4), ("cc<end>", 2)],
)
def test_masks_after_guesses_are_those_of_these_tokens(monkeypatch, guesses, num_allowed):
    """Up to the first that is not allowed, or that ends the answer; whatever is sampled then, the grammar goes on."""
    monkeypatch.setattr(service_module, "_GUESS_SECONDS", 10.0)
    service = open_service(str(TOKENIZER_FILE))

    def ask(*job: Any) -> MaskAnswer:
        return msgspec.msgpack.decode(service(msgspec.msgpack.encode(MaskJob(0, *job))), type=MaskAnswer)

    grammar, output = regex("(a|b|c){2,9}d?"), encode("ab")
    asked = [token for part in re.findall("<end>|.", guesses) for token in ([EOS] if part == "<end>" else encode(part))]
    ask([], [], grammar, (EOS,))
    answer = ask(output, asked)
    assert answer.guesses == asked[:num_allowed]
    assert split_masks(answer) == [expected(grammar, [*output, *asked[:count]]) for count in range(num_allowed + 1)]
    after = ask(encode("b"), encode("d"))
    assert (after.guesses, split_masks(after)) == ([], [expected(grammar, [*output, *encode("b")])])
    monkeypatch.setattr(service_module, "_GUESS_SECONDS", -1.0)
    assert ask(encode("c"), encode("a")).guesses == []


def test_guesses_that_cost_a_worker_are_not_tried_again(lanes, monkeypatch):
    monkeypatch.setattr(lanes_module, "_MAX_ATTEMPTS", 1)
    grammar = regex("(ab|c){2,9}d")
    lanes.start(0, grammar, (EOS,), [])
    collect(lanes)
    [lane] = lanes._fast
    assert lane.worker.pid > 0
    os.kill(lane.worker.pid, signal.SIGSTOP)
    lanes.advance(0, encode("c"), encode("c"))
    os.kill(lane.worker.pid, signal.SIGKILL)
    answer = collect(lanes)[0]
    assert (answer.guesses, allowed(answer)) == ([], expected(grammar, encode("c")))


def test_the_end_is_allowed_where_the_grammar_may_end(lanes):
    lanes.start(0, regex("[0-9]+"), (EOS, 4000), [])
    assert not {EOS, 4000} & allowed(collect(lanes)[0])
    lanes.advance(0, encode("1"))
    assert {EOS, 4000} <= allowed(collect(lanes)[0])
    lanes.advance(0, [EOS])
    assert collect(lanes)[0].finished


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (json.dumps({"grammars": [{"lark_grammar": "start: start"}]}), "grammar"),
        (HOSTILE, "takes more than 0.6 s of processor time for one token; simplify it"),
        (DEEP, "nested too deeply|needs more|too large|cannot be followed"),
    ],
)  # fmt: skip
def test_a_hostile_grammar_costs_its_sequence_only(lanes, grammar, says):
    good = regex("[a-z]{3,400}")
    lanes.start(0, good, (EOS,), [])
    collect(lanes)
    lanes.start(1, grammar, (EOS,), [])
    output: list[int] = []
    slowest, deadline = 0.0, time.monotonic() + 60.0
    while True:
        assert time.monotonic() < deadline
        began = time.monotonic()
        output += encode("a")
        lanes.advance(0, encode("a"))
        found = collect(lanes)
        while 0 not in found:
            found |= collect(lanes)
        slowest = max(slowest, time.monotonic() - began)
        if 1 in found:
            break
        time.sleep(0.02)
    assert re.search(says, found[1].error), found[1].error
    assert slowest < 1.0
    lanes.start(2, grammar, (EOS,), [])
    assert collect(lanes)[2].error == found[1].error, "it is known now"


@pytest.fixture
def slow_lanes(monkeypatch) -> Iterator[MaskLanes]:
    """One fast lane, on which some tokens take long."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    monkeypatch.setattr(lanes_module, "_FAST_LANES", 1)
    monkeypatch.setattr(lanes_module, "SERVICE", "tests.engine.slow_masks")
    with contextlib.closing(MaskLanes(str(TOKENIZER_FILE))) as made:
        yield made


def test_a_grammar_that_turns_slow_leaves_the_lane(slow_lanes):
    good, bad = regex("[a-z]{3,400}"), regex("[a-z!?]{3,400}")
    slow_lanes.start(0, good, (EOS,), encode("xyz"))
    slow_lanes.start(1, bad, (EOS,), [])
    slow_lanes.start(2, bad, (EOS,), [])
    collect(slow_lanes, 3)
    slow_lanes.advance(1, encode("?"))
    assert allowed(collect(slow_lanes)[1]) == expected(bad, encode("?"))
    slow_lanes.advance(1, encode("!"))
    slow_lanes.advance(2, encode("a"))
    slow_lanes.advance(0, encode("a"))
    found = collect(slow_lanes, 3)
    assert allowed(found[0]) == expected(good, [*encode("xyz"), *encode("a")])
    assert allowed(found[2]) == expected(bad, encode("a"))
    assert "takes more than 0.6 s of processor time for one token" in found[1].error


def test_a_job_that_hangs_on_a_fast_lane_goes_on_on_a_slow_one(slow_lanes):
    good, bad = regex("[a-z]{3,}"), regex("[a-z!]{3,400}")  # the good one has no end that a busy machine could reach
    slow_lanes.start(0, bad, (EOS,), [])
    slow_lanes.start(1, good, (EOS,), [])
    collect(slow_lanes, 2)
    slow_lanes.advance(0, encode("!"))
    output: list[int] = []
    found: dict[int, MaskAnswer] = {}
    while 0 not in found:  # the other one goes on meanwhile
        output += encode("a")
        slow_lanes.advance(1, encode("a"))
        found.pop(1, None)
        while 1 not in found:
            found |= collect(slow_lanes)
        assert allowed(found[1]) == expected(good, output)
    assert "processor time" in found[0].error
    assert len(output) > 3


def test_an_error_of_the_service_costs_its_sequence_only(slow_lanes):
    good, bad = regex("[a-z]{3,400}"), regex("[a-z#]{3,400}")
    slow_lanes.start(0, bad, (EOS,), [])
    slow_lanes.start(1, good, (EOS,), [])
    collect(slow_lanes, 2)
    slow_lanes.advance(0, encode("#"))
    slow_lanes.advance(1, encode("a"))
    found = collect(slow_lanes, 2)
    assert "have failed" in found[0].error
    assert allowed(found[1]) == expected(good, encode("a"))


def test_a_job_without_processor_time_is_no_verdict_on_its_grammar(slow_lanes, monkeypatch):
    grammar = regex("[a-z~]{3,400}")
    slow_lanes.start(0, grammar, (EOS,), [])
    slow_lanes.start(1, grammar, (EOS,), encode("a"))
    collect(slow_lanes, 2)
    monkeypatch.setattr(lanes_module, "_WALL_FACTOR", 2.0)
    slow_lanes.advance(0, encode("~"))
    assert "the machine is busy" in collect(slow_lanes)[0].error
    monkeypatch.setattr(lanes_module, "_WALL_FACTOR", 100.0)
    slow_lanes.advance(1, encode("b"))
    assert allowed(collect(slow_lanes)[1]) == expected(grammar, encode("ab"))


def test_a_nursery_that_is_stuck_starts_again(lanes, monkeypatch, caplog):
    grammar = regex("[a-z]{3,400}")
    lanes._sandbox.start()
    stuck = lanes._sandbox.pid
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)
    monkeypatch.setattr(lanes_module, "_START_SECONDS", 1.0)
    lanes.start(0, grammar, (EOS,), encode("ab"))
    monkeypatch.setattr(lanes_module, "_START_SECONDS", 60.0)
    assert allowed(collect(lanes)[0]) == expected(grammar, encode("ab"))
    assert lanes._sandbox.pid != stuck
    assert "started again" in caplog.text


def test_workers_that_are_killed_or_stopped_are_replaced(lanes):
    grammar = regex("[a-z]{3,400}")
    for key in range(4):
        lanes.start(key, grammar, (EOS,), encode("ab"))
    collect(lanes, 4)
    for number, blow in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        for pid in workers_of(lanes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, blow)
        for key in range(4):
            lanes.advance(key, encode("c"))
        found = collect(lanes, 4)
        for key in range(4):
            assert allowed(found[key]) == expected(grammar, encode("ab") + encode("c") * number)


def test_a_sequence_whose_workers_are_always_killed_ends(lanes):
    lanes.start(0, HOSTILE, (EOS,), [])
    deadline = time.monotonic() + 30.0
    found: dict[int, MaskAnswer] = {}
    while not found:
        assert time.monotonic() < deadline
        found.update(lanes.collect(0.01))
        for pid in workers_of(lanes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert "were killed" in found[0].error


def test_a_dropped_sequence_is_not_answered(lanes):
    grammar = regex("[a-z]{3,400}")
    lanes.start(0, grammar, (EOS,), [])
    lanes.start(1, grammar, (EOS,), [])
    collect(lanes, 2)
    for _ in range(3):
        lanes.advance(0, encode("a"))
        lanes.advance(1, encode("a"))
        lanes.drop(1)
        assert set(collect(lanes)) == {0}
        lanes.start(1, grammar, (EOS,), [])
        collect(lanes)
    lanes.start(2, HOSTILE, (EOS,), [])
    lanes.drop(2)
    lanes.advance(0, encode("a"))
    assert set(collect(lanes)) == {0}


def test_a_tokenizer_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with contextlib.closing(MaskLanes(str(tmp_path / "tokenizer.json"))) as lanes:
        lanes.start(0, regex("a"), (EOS,), [])
        assert "cannot be used with grammars" in collect(lanes)[0].error
