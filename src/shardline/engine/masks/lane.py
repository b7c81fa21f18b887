"""One worker that computes masks, and the sequences that it follows."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from shardline.engine.masks.service import MaskAnswer, MaskJob
from shardline.sandbox.client import Worker, WorkerEnded
from shardline.sandbox.confinement import Limit
from shardline.segment.activity import is_stopped

_log = logging.getLogger(__name__)

_WALL_FACTOR = 5.0
"""A worker may take so many times the processor time of its job, at least 1 s. Then it is killed, and is at fault if it
was not stopped."""
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
            raise (WorkerEnded(Limit.TIME) if self._is_late else ended) from None
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

    def kill_if_late(self) -> None:
        """Kill the worker if it takes too long; `take_answers` then sees its end."""
        if self._sent and time.monotonic() - self._since > max(1.0, _WALL_FACTOR * self.seconds):
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
                job = MaskJob(followed.key, tokens, followed.grammar, followed.end_ids, drops)
            else:
                job = MaskJob(followed.key, tokens, drops=drops)
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
