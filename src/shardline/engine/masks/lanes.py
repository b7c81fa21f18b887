"""Which worker computes the masks of which sequence.

A grammar that nobody knows is tried first, in a worker of its own. If it is quick, its sequences are followed on a fast
lane, else on a slow one. So a sequence never waits behind a grammar that is slower than its own. A job that exceeds its
time on a fast lane goes on on a slow one; there, the limit is an error of its sequence only. The sequences that a lost
worker has followed are rebuilt elsewhere from their grammars and tokens.
"""

from __future__ import annotations

import hashlib
import logging
import select
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from shardline.engine.masks.service import MaskAnswer, MaskJob
from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.worker import Worker, WorkerEnded
from shardline.segment.activity import is_stopped

_log = logging.getLogger(__name__)

_WALL_FACTOR = 5.0
"""A worker may take so many times the processor time of its job, at least 1 s. Then it is killed, and is at fault if it
was not stopped."""
_START_SECONDS = 15.0
"""A worker begins in this time, or its nursery is stuck."""
_LARGE = 16_384
"""Bytes of a job that is sent only to a lane without jobs, so that sending it never waits."""


@dataclass(eq=False)
class Followed:
    """A sequence, or the trial of a grammar."""

    key: int
    grammar: str
    end_ids: tuple[int, ...]
    tokens: list[int]
    """All of its output so far."""
    guesses: list[int] = field(default_factory=list)
    """What may follow these, in the next job."""
    is_trial: bool = False
    lane: Lane | None = None
    num_sent: int | None = None
    """Tokens that its lane has got; None: the lane does not know it yet."""
    attempts: int = 0
    """Workers that it has lost since its last answer."""


class Lane:
    """A worker. Jobs are answered in the order in which they are asked for."""

    def __init__(self, worker: Worker, seconds: float, window: int) -> None:
        """`seconds`: processor time of a job. `window`: jobs that the worker has at a time; their answers must fit into
        a socket's buffer."""
        self.worker = worker
        self.seconds = seconds
        self.members: set[Followed] = set()
        self._window = window
        self._unsent: deque[Followed] = deque()
        self._sent: deque[Followed | None] = deque()
        """Those with a job that is not answered yet; None: it has been dropped."""
        self._since = 0.0
        """When the first of the sent jobs became the first."""
        self._drops: list[int] = []
        """Keys that the worker can forget."""
        self._is_late = False
        """Whether it was killed because it took too long, though it was not stopped."""
        self._begun_until = time.monotonic() + _START_SECONDS

    @property
    def is_busy(self) -> bool:
        """Whether an answer will come."""
        return bool(self._sent)

    def join(self, followed: Followed) -> None:
        """Follow a sequence that no lane follows."""
        followed.lane, followed.num_sent = self, None
        self.members.add(followed)

    def leave(self, followed: Followed) -> None:
        """Follow a sequence no longer; its job is not answered any more."""
        self.members.remove(followed)
        followed.lane = None
        if followed in self._unsent:
            self._unsent.remove(followed)
        self._sent = deque(None if other is followed else other for other in self._sent)
        self._drops.append(followed.key)

    def ask(self, followed: Followed) -> None:
        """Ask for the mask after all tokens of a sequence that this lane follows."""
        self._unsent.append(followed)
        self._send()

    def take_answers(self) -> list[tuple[Followed, MaskAnswer]]:
        """The answers that have come, if the worker's socket is readable.

        Raises:
            WorkerEnded: the worker has ended.
        """
        answers = []
        try:
            bodies = self.worker.take_answers()
        except WorkerEnded as ended:
            raise (WorkerEnded(Limit.DEADLINE) if self._is_late else ended) from None
        except RuntimeError as error:  # what the service did not expect costs its sequence, not the engine
            _log.error("%s", error)
            raise WorkerEnded(Limit.UNKNOWN) from error
        for body in bodies:
            followed = self._sent.popleft()
            self._since = time.monotonic()
            if followed is not None:
                answers.append((followed, msgspec.msgpack.decode(body, type=MaskAnswer)))
        self._send()
        return answers

    @property
    def is_stuck(self) -> bool:
        """Whether the worker should have begun long ago."""
        return self.worker.pid == 0 and time.monotonic() > self._begun_until

    def kill_if_late(self) -> None:
        """Kill the worker if it takes too long; `take_answers` then sees its end."""
        if self.worker.pid == 0:
            self._since = time.monotonic()  # its job has not begun
        elif self._sent and time.monotonic() - self._since > max(1.0, _WALL_FACTOR * self.seconds):
            self._is_late = not is_stopped(self.worker.pid)
            self.worker.kill()

    def close(self) -> tuple[Followed | None, list[Followed]]:
        """Give the lane up. Returns the sequence of the job that ran, and all that await an answer."""
        self.worker.close()
        for followed in self.members:
            followed.lane = None
        ran = self._sent[0] if self._sent else None
        return ran, [*(followed for followed in self._sent if followed is not None), *self._unsent]

    def _send(self) -> None:
        """Send as many jobs as the worker takes."""
        while self._unsent and len(self._sent) < self._window:
            followed = self._unsent[0]
            tokens, drops = followed.tokens[followed.num_sent or 0 :], tuple(self._drops)
            if followed.num_sent is None:
                job = MaskJob(followed.key, tokens, [], followed.grammar, followed.end_ids, drops)
            else:
                job = MaskJob(followed.key, tokens, followed.guesses, drops=drops)
            body = msgspec.msgpack.encode(job)
            if len(body) > _LARGE and self._sent:
                return
            self._unsent.popleft()
            self._drops.clear()
            followed.num_sent = len(followed.tokens)
            if not self._sent:
                self._since = time.monotonic()
            self._sent.append(followed)
            self.worker.send(body, self.seconds)


SERVICE = "shardline.engine.masks.service"
JOB_SECONDS = 2.0
"""Processor time that one mask, or the compilation of a grammar, may take."""
_FAST_JOB_SECONDS = 0.05
"""The same on a fast lane: the other sequences of the lane wait so long."""
_FAST_MASK_SECONDS = 0.005
"""A grammar whose masks take longer is slow."""
_MEMORY = 512 << 20
_FAST_LANES, _SLOW_LANES, _TRIALS = 2, 2, 2
_FAST_WINDOW = 4
_SLOW_NICENESS = 10
_MAX_ATTEMPTS = 3
"""Workers that a sequence may lose without having exceeded a limit."""
_MAX_KNOWN = 10_000


class MaskLanes:
    """Masks of sequences. All methods belong to one thread, and none of them waits but `collect`."""

    def __init__(self, tokenizer_file: str) -> None:
        """`tokenizer_file`: a tokenizer.json or a GGUF file. It is read when the first grammar comes."""
        self._sandbox = Sandbox(SERVICE, tokenizer_file, title="masks", memory=_MEMORY)
        self._followed: dict[int, Followed] = {}
        self._known: OrderedDict[bytes, bool | str] = OrderedDict()
        """For each grammar that was tried, whether it is fast, or why it is refused."""
        self._trials: dict[bytes, list[Followed]] = {}
        """The sequences that wait for the trial of their grammar."""
        self._untried: deque[Followed] = deque()
        self._fast: list[Lane] = []
        self._slow: list[Lane] = []
        self._trying: list[Lane] = []
        self._answers: list[tuple[int, MaskAnswer]] = []

    def start(self, key: int, grammar: str, end_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Ask for the first mask of a sequence after its output so far."""
        assert key not in self._followed
        followed = self._followed[key] = Followed(key, grammar, tuple(end_ids), list(token_ids))
        self._ask(followed)

    def advance(self, key: int, token_ids: Sequence[int], guesses: Sequence[int] = ()) -> None:
        """Ask for the mask after these further tokens, and for those after guesses of the tokens that follow. The last
        mask must have been answered."""
        followed = self._followed[key]
        followed.tokens += token_ids
        followed.guesses = list(guesses)
        self._ask(followed)

    def drop(self, key: int) -> None:
        """Forget a sequence; no answer comes for it any more."""
        followed = self._followed.pop(key)
        self._answers = [answer for answer in self._answers if answer[0] != key]
        for waiting in self._trials.values():
            if followed in waiting:
                waiting.remove(followed)
        if followed.lane is not None:
            followed.lane.leave(followed)

    def collect(self, timeout: float) -> list[tuple[int, MaskAnswer]]:
        """The answers that have come, by key; waits up to `timeout` seconds for the first one."""
        lanes = {lane.worker.fileno(): lane for lane in self._lanes() if lane.is_busy}
        poll = select.poll()
        for fd in lanes:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0 if self._answers else 1000 * timeout):
            self._read(lanes[fd])
        for lane in self._lanes():
            lane.kill_if_late()
        if any(lane.is_stuck for lane in self._lanes()):
            self._restart_nursery()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End all workers."""
        for lane in self._lanes():
            lane.close()
        self._sandbox.close()

    def _lanes(self) -> list[Lane]:
        return [*self._fast, *self._slow, *self._trying]

    def _ask(self, followed: Followed) -> None:
        """Have the next mask of a sequence computed."""
        digest = _digest(followed.grammar)
        verdict = self._known.get(digest)
        if verdict is None:
            self._try_grammar(digest, followed)
        elif isinstance(verdict, str):
            self._answers.append((followed.key, MaskAnswer(error=verdict)))
        else:
            lanes = self._fast if verdict else self._slow
            if followed.lane is not None and followed.lane not in lanes:
                followed.lane.leave(followed)
            if followed.lane is None:
                self._choose(lanes).join(followed)
            assert followed.lane is not None
            followed.lane.ask(followed)

    def _choose(self, lanes: list[Lane]) -> Lane:
        """An idle lane, a new one, or the one with the fewest sequences."""
        best = min(lanes, key=lambda lane: len(lane.members), default=None)
        is_fast = lanes is self._fast
        if best is None or (best.members and len(lanes) < (_FAST_LANES if is_fast else _SLOW_LANES)):
            if is_fast:
                best = Lane(self._sandbox.fork(), _FAST_JOB_SECONDS, _FAST_WINDOW)
            else:
                best = Lane(self._sandbox.fork(_SLOW_NICENESS), JOB_SECONDS, 1)
            lanes.append(best)
        return best

    def _try_grammar(self, digest: bytes, followed: Followed) -> None:
        """Find out whether a grammar is fast; its sequences wait for the answer."""
        if digest in self._trials:
            self._trials[digest].append(followed)
            return
        self._trials[digest] = [followed]
        self._untried.append(Followed(-1, followed.grammar, followed.end_ids, [], is_trial=True))
        self._start_trials()

    def _start_trials(self) -> None:
        while self._untried:
            lane = next((lane for lane in self._trying if not lane.members), None)
            if lane is None:
                if len(self._trying) == _TRIALS:
                    return
                lane = Lane(self._sandbox.fork(_SLOW_NICENESS), JOB_SECONDS, 1)
                self._trying.append(lane)
            trial = self._untried.popleft()
            lane.join(trial)
            lane.ask(trial)

    def _read(self, lane: Lane) -> None:
        """Take the answers of a lane, and replace it if it has ended."""
        try:
            answers = lane.take_answers()
        except WorkerEnded as ended:
            self._replace(lane, ended.limit)
            return
        for followed, answer in answers:
            is_slow = answer.mask_seconds > _FAST_MASK_SECONDS
            if followed.is_trial:
                lane.leave(followed)
                self._end_trial(followed, answer.error or not (is_slow or answer.seconds > _FAST_JOB_SECONDS))
                continue
            followed.attempts = 0
            self._answers.append((followed.key, answer))
            if is_slow:
                self._known[_digest(followed.grammar)] = False  # its sequences change lanes at their next mask

    def _restart_nursery(self) -> None:
        """Replace a nursery that starts no workers. It ends all of its workers."""
        _log.warning("the process that starts the processes for masks did not answer: it is started again")
        self._sandbox.close()
        for lane in self._lanes():
            self._replace(lane, Limit.UNKNOWN)

    def _end_trial(self, trial: Followed, verdict: bool | str, *, is_lasting: bool = True) -> None:
        """Go on with the sequences that waited for a trial."""
        digest = _digest(trial.grammar)
        self._known[digest] = verdict
        for followed in self._trials.pop(digest):
            self._ask(followed)
        if not is_lasting:
            del self._known[digest]
        elif len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        self._start_trials()

    def _replace(self, lane: Lane, limit: Limit) -> None:
        """Rebuild the sequences of a lane whose worker has ended, but for the one at fault."""
        culprit, pending = lane.close()
        for lanes in (self._fast, self._slow, self._trying):
            if lane in lanes:
                lanes.remove(lane)
        for followed in pending:
            if followed is culprit and self._is_at_fault(followed, limit, was_fast=lane.seconds < JOB_SECONDS):
                error = f"the grammar {_explain(limit)}"
                if followed.is_trial:
                    self._end_trial(followed, error, is_lasting=limit not in (Limit.UNKNOWN, Limit.DEADLINE))
                else:
                    self._answers.append((followed.key, MaskAnswer(error=error)))
            elif followed.is_trial:
                self._untried.appendleft(followed)
                self._start_trials()
            else:
                self._ask(followed)

    def _is_at_fault(self, culprit: Followed, limit: Limit, *, was_fast: bool) -> bool:
        """Whether a sequence in whose job a worker has ended cannot go on. Guesses may have been at fault: without them
        it tries again."""
        if culprit.guesses:
            culprit.guesses = []
            return False
        culprit.attempts += 1
        if was_fast and limit in (Limit.TIME, Limit.DEADLINE):
            self._known[_digest(culprit.grammar)] = False
            return False
        return limit is not Limit.UNKNOWN or culprit.attempts >= _MAX_ATTEMPTS


def _digest(grammar: str) -> bytes:
    return hashlib.blake2b(grammar.encode(), digest_size=16).digest()


def _explain(limit: Limit) -> str:
    if limit is Limit.TIME:
        return f"takes more than {JOB_SECONDS:g} s of processor time for one token; simplify it"
    if limit is Limit.DEADLINE:
        return f"could not be followed in {_WALL_FACTOR * JOB_SECONDS:g} s: it is complex, or the machine is busy"
    if limit is Limit.MEMORY:
        return f"needs more than {_MEMORY >> 20} MB of memory; simplify it"
    if limit is Limit.STACK:
        return "is nested too deeply; simplify it"
    return "could not be followed: the processes that follow it have failed, or were killed; simplify it"
