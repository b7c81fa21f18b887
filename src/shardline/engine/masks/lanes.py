"""The workers that compute masks, and which sequence is on which of them.

A grammar that nobody knows is tried first, in a worker of its own. If it is quick, its sequences are followed on a fast
lane, else on a slow one. So a sequence never waits behind a grammar that is slower than its own. A job that exceeds its
time on a fast lane goes on on a slow one; there, the limit is an error of its sequence only. The sequences that a lost
worker has followed are rebuilt elsewhere from their grammars and tokens.
"""

from __future__ import annotations

import hashlib
import select
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.engine.masks.service import MaskAnswer, MaskJob
from shardline.sandbox.client import Sandbox, Worker, WorkerEnded
from shardline.sandbox.confinement import Limit
from shardline.segment.activity import is_stopped

SERVICE = "shardline.engine.masks.service"
JOB_SECONDS = 2.0
"""Processor time that one mask, or the compilation of a grammar, may take."""
_FAST_JOB_SECONDS = 0.05
"""The same on a fast lane: the other sequences of the lane wait so long."""
_FAST_MASK_SECONDS = 0.005
"""A grammar whose masks take longer is slow."""
_WALL_FACTOR = 5.0
"""A worker may take so many times the processor time of its job, at least 1 s. Then it is killed, and is at fault if it
was not stopped."""
_MEMORY = 512 << 20
_FAST_LANES, _SLOW_LANES, _TRIALS = 2, 2, 2
_MAX_ATTEMPTS = 3
"""Workers that a sequence may lose without having exceeded a limit."""
_MAX_KNOWN = 10_000
_WINDOW = 4
"""Jobs that a fast lane has at a time. Their answers must fit into a socket's buffer."""
_LARGE = 16_384
"""Bytes of a job that is sent only to a lane without jobs, so that sending it never waits."""


@dataclass(eq=False)
class _Followed:
    """A sequence, and a trial of its grammar."""

    key: int
    grammar: str
    end_ids: tuple[int, ...]
    tokens: list[int]
    """All of its output so far."""
    num_sent: int | None = None
    """Tokens that its lane has got; None: the lane does not know it yet."""
    lane: _Lane | None = None
    attempts: int = 0
    is_trial: bool = False


@dataclass(eq=False)
class _Lane:
    """A worker, and the sequences whose masks it was asked for."""

    worker: Worker
    seconds: float
    """Processor time of a job."""
    window: int
    members: set[_Followed] = field(default_factory=set)
    waiting: deque[_Followed] = field(default_factory=deque)
    """Those with a job that is not sent yet."""
    sent: deque[_Followed | None] = field(default_factory=deque)
    """Those with a job that is not answered yet; None: it has been dropped."""
    since: float = 0.0
    """When the first of the sent jobs became the first."""
    drops: list[int] = field(default_factory=list)
    """The keys that its worker can forget."""
    is_late: bool = False
    """Whether it was killed because it took too long, on a machine that is busy."""


class MaskLanes:
    """Masks of sequences. All methods belong to one thread, and none of them waits but `collect`."""

    def __init__(self, tokenizer_file: str) -> None:
        """`tokenizer_file`: a tokenizer.json or a GGUF file. It is read when the first grammar comes."""
        self._sandbox = Sandbox(SERVICE, tokenizer_file, title="shardline: masks", memory=_MEMORY)
        self._followed: dict[int, _Followed] = {}
        self._known: OrderedDict[bytes, bool | str] = OrderedDict()
        """For each grammar that was tried, whether it is fast, or why it is refused."""
        self._trials: dict[bytes, list[_Followed]] = {}
        """The sequences that wait for the trial of their grammar."""
        self._untried: deque[_Followed] = deque()
        self._fast: list[_Lane] = []
        self._slow: list[_Lane] = []
        self._trying: list[_Lane] = []
        self._answers: list[tuple[int, MaskAnswer]] = []
        self._num_trials = 0

    def start(self, key: int, grammar: str, end_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Ask for the first mask of a sequence after its output so far. `key` is not negative."""
        assert key not in self._followed
        followed = self._followed[key] = _Followed(key, grammar, tuple(end_ids), list(token_ids))
        self._ask(followed)

    def advance(self, key: int, token_ids: Sequence[int]) -> None:
        """Ask for the mask after these further tokens. The last mask must have been answered."""
        followed = self._followed[key]
        followed.tokens += token_ids
        self._ask(followed)

    def drop(self, key: int) -> None:
        """Forget a sequence; no answer comes for it any more."""
        followed = self._followed.pop(key, None)
        if followed is None:
            return
        self._answers = [answer for answer in self._answers if answer[0] != key]
        for waiting in self._trials.values():
            if followed in waiting:
                waiting.remove(followed)
        if (lane := followed.lane) is not None:
            lane.members.remove(followed)
            if followed in lane.waiting:
                lane.waiting.remove(followed)
            lane.sent = deque(None if other is followed else other for other in lane.sent)
            lane.drops.append(key)

    def collect(self, timeout: float) -> list[tuple[int, MaskAnswer]]:
        """The answers that have come, by key; waits up to `timeout` seconds for the first one."""
        lanes = {lane.worker.fileno(): lane for lane in self._lanes() if lane.sent}
        poll = select.poll()
        for fd in lanes:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0 if self._answers else 1000 * timeout):
            self._read(lanes[fd])
        now = time.monotonic()
        for lane in self._lanes():
            if lane.sent and now - lane.since > max(1.0, _WALL_FACTOR * lane.seconds):
                lane.is_late = not is_stopped(lane.worker.pid)
                lane.worker.kill()  # the next call sees its end
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End all workers."""
        for lane in self._lanes():
            lane.worker.close()
        self._sandbox.close()

    def _lanes(self) -> list[_Lane]:
        return [*self._fast, *self._slow, *self._trying]

    def _ask(self, followed: _Followed) -> None:
        """Have the next mask of a sequence computed."""
        digest = _digest(followed.grammar)
        verdict = self._known.get(digest)
        if verdict is None:
            self._try_grammar(digest, followed)
            return
        if isinstance(verdict, str):
            self._answers.append((followed.key, MaskAnswer(error=verdict)))
            return
        lanes = self._fast if verdict else self._slow
        if followed.lane is None or followed.lane not in lanes:
            self._leave_lane(followed)
            lane = self._choose(lanes, is_fast=verdict)
            followed.lane, followed.num_sent = lane, None
            lane.members.add(followed)
        assert followed.lane is not None
        followed.lane.waiting.append(followed)
        self._send(followed.lane)

    def _leave_lane(self, followed: _Followed) -> None:
        if followed.lane is not None:
            followed.lane.members.remove(followed)
            followed.lane.drops.append(followed.key)
            followed.lane = None

    def _choose(self, lanes: list[_Lane], *, is_fast: bool) -> _Lane:
        """The lane with the fewest sequences, or a new one."""
        idle = next((lane for lane in lanes if not lane.members), None)
        if idle is not None:
            return idle
        if len(lanes) < (_FAST_LANES if is_fast else _SLOW_LANES):
            seconds = _FAST_JOB_SECONDS if is_fast else JOB_SECONDS
            lanes.append(_Lane(self._sandbox.fork(0 if is_fast else 10), seconds, _WINDOW if is_fast else 1))
            return lanes[-1]
        return min(lanes, key=lambda lane: len(lane.members))

    def _try_grammar(self, digest: bytes, followed: _Followed) -> None:
        """Find out whether a grammar is fast; its sequences wait for the answer."""
        if digest in self._trials:
            self._trials[digest].append(followed)
            return
        self._trials[digest] = [followed]
        self._num_trials += 1
        self._untried.append(_Followed(-self._num_trials, followed.grammar, followed.end_ids, [], is_trial=True))
        self._start_trials()

    def _start_trials(self) -> None:
        while self._untried:
            lane = next((lane for lane in self._trying if not lane.members), None)
            if lane is None:
                if len(self._trying) == _TRIALS:
                    return
                lane = _Lane(self._sandbox.fork(10), JOB_SECONDS, 1)
                self._trying.append(lane)
            trial = self._untried.popleft()
            trial.lane, trial.num_sent = lane, None
            lane.members.add(trial)
            lane.waiting.append(trial)
            self._send(lane)

    def _send(self, lane: _Lane) -> None:
        """Send as many jobs as the lane takes."""
        while lane.waiting and len(lane.sent) < lane.window:
            followed = lane.waiting[0]
            tokens, drops = followed.tokens[followed.num_sent or 0 :], tuple(lane.drops)
            if followed.num_sent is None:
                job = MaskJob(followed.key, tokens, followed.grammar, followed.end_ids, drops)
            else:
                job = MaskJob(followed.key, tokens, drops=drops)
            body = msgspec.msgpack.encode(job)
            if len(body) > _LARGE and lane.sent:
                return
            lane.waiting.popleft()
            lane.drops.clear()
            followed.num_sent = len(followed.tokens)
            if not lane.sent:
                lane.since = time.monotonic()
            lane.sent.append(followed)
            lane.worker.send(body, lane.seconds)

    def _read(self, lane: _Lane) -> None:
        """Take the answers of a lane, and replace it if it has ended."""
        try:
            bodies = lane.worker.take_answers()
        except WorkerEnded as ended:
            self._replace(lane, Limit.TIME if lane.is_late else ended.limit)
            return
        for body in bodies:
            followed = lane.sent.popleft()
            lane.since = time.monotonic()
            if followed is None:
                continue
            answer = msgspec.msgpack.decode(body, type=MaskAnswer)
            if followed.is_trial:
                lane.members.remove(followed)
                lane.drops.append(followed.key)
                is_fast = answer.seconds <= _FAST_JOB_SECONDS and answer.mask_seconds <= _FAST_MASK_SECONDS
                self._end_trial(followed, answer.error or is_fast)
                continue
            followed.attempts = 0
            self._answers.append((followed.key, answer))
            if answer.mask_seconds > _FAST_MASK_SECONDS:
                self._known[_digest(followed.grammar)] = False  # its sequences change lanes at their next mask
        self._send(lane)

    def _end_trial(self, trial: _Followed, verdict: bool | str, *, is_lasting: bool = True) -> None:
        """Go on with the sequences that waited for a trial."""
        digest = _digest(trial.grammar)
        self._known[digest] = verdict
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        for followed in self._trials.pop(digest):
            self._ask(followed)
        if not is_lasting:
            del self._known[digest]
        self._start_trials()

    def _replace(self, lane: _Lane, limit: Limit) -> None:
        """Rebuild the sequences of a lane whose worker has ended, but for the first one if it has hit a limit."""
        lane.worker.close()
        for lanes in (self._fast, self._slow, self._trying):
            if lane in lanes:
                lanes.remove(lane)
        culprit = lane.sent[0] if lane.sent else None
        pending = [*(followed for followed in lane.sent if followed is not None), *lane.waiting]
        for followed in lane.members:
            followed.lane = None
        for followed in pending:
            if followed is culprit:
                self._judge(followed, limit, was_fast=lane.seconds < JOB_SECONDS)
            else:
                self._resume(followed)

    def _judge(self, culprit: _Followed, limit: Limit, *, was_fast: bool) -> None:
        """What becomes of the sequence in whose job a worker has ended."""
        culprit.attempts += 1
        if limit is Limit.TIME and was_fast:
            self._known[_digest(culprit.grammar)] = False
        elif limit is not Limit.UNKNOWN or culprit.attempts >= _MAX_ATTEMPTS:
            error = f"the grammar {_explain(limit)}; simplify it"
            if culprit.is_trial:
                self._end_trial(culprit, error, is_lasting=limit is not Limit.UNKNOWN)
            else:
                self._answers.append((culprit.key, MaskAnswer(error=error)))
            return
        self._resume(culprit)

    def _resume(self, followed: _Followed) -> None:
        if followed.is_trial:
            self._untried.appendleft(followed)
            self._start_trials()
        else:
            self._ask(followed)


def _digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(), digest_size=16).digest()


def _explain(limit: Limit) -> str:
    if limit is Limit.TIME:
        return f"takes more than {JOB_SECONDS:g} s of processor time for one token"
    if limit is Limit.MEMORY:
        return f"needs more than {_MEMORY >> 20} MB of memory"
    if limit is Limit.STACK:
        return "is nested too deeply"
    return "could not be followed, because the processes that follow it were killed"
