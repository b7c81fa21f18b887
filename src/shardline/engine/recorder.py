"""Notes what happens to a sequence, for its EngineTimeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardline.messages.timeline import EngineTimeline, Preemption, PrefillChunk

MOST_CHUNKS = 128
"""Chunks that are listed; further ones become part of the last one, so that a message stays small."""


@dataclass(slots=True)
class TimelineRecorder:
    """The timeline of one sequence. `now` is in seconds of any clock; a changed timeline is reported with a token."""

    added: float
    scheduled: float = -1.0
    first_token: float = -1.0
    chunks: list[PrefillChunk] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    awaits_token: bool = True
    """Whether the next token is its first one, or the first one after a preemption."""

    def note_start(self, now: float) -> None:
        """It is part of a step, for the first time or again after a preemption."""
        if self.scheduled < 0:
            self.scheduled = now - self.added

    def note_chunk(self, start: int, num_tokens: int, planned: float, now: float) -> None:
        """A step computed several tokens that were known before."""
        if len(self.chunks) == MOST_CHUNKS:
            last = self.chunks[-1]
            seconds = now - self.added - last.at
            self.chunks[-1] = PrefillChunk(last.start, last.num_tokens + num_tokens, last.at, seconds)
        else:
            self.chunks.append(PrefillChunk(start, num_tokens, planned - self.added, now - planned))

    def note_preemption(self, num_lost_tokens: int, now: float) -> None:
        """It has lost its blocks."""
        self.preemptions.append(Preemption(now - self.added, num_lost_tokens, 0.0))
        self.awaits_token = True

    def note_token(self, now: float, *, running: bool) -> None:
        """A token has come; `running`: it was not planned before the last preemption."""
        at = now - self.added
        if self.first_token < 0:
            self.first_token = at
        if not running:
            return
        self.awaits_token = False
        # Preemptions before the same token share their cost: each counts until the next one.
        for index in range(len(self.preemptions) - 1, -1, -1):
            one = self.preemptions[index]
            if one.seconds:
                break
            self.preemptions[index] = Preemption(one.at, one.num_lost_tokens, at - one.at)
            at = one.at

    def timeline(self) -> EngineTimeline:
        """Everything so far."""
        return EngineTimeline(self.scheduled, self.first_token, list(self.chunks), list(self.preemptions))
