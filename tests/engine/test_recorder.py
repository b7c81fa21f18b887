"""Timelines of sequences in a scheduler whose clock is the test's."""

from __future__ import annotations

from shardline.engine.scheduling.sequence import MOST_CHUNKS, TimelineRecorder


def test_chunks_and_first_token() -> None:
    recorder = TimelineRecorder(10.0)
    recorder.note_start(11.0)
    recorder.note_chunk(0, 64, 11.0, 12.0)
    recorder.note_chunk(64, 6, 12.0, 12.5)
    recorder.note_token(12.5, running=True)
    assert not recorder.awaits_token
    found = recorder.timeline()
    assert (found.scheduled, found.first_token) == (1.0, 2.5)
    assert [(c.start, c.num_tokens, c.at, c.seconds) for c in found.prefill_chunks] == [
        (0, 64, 1.0, 1.0),
        (64, 6, 2.0, 0.5),
    ]


def test_a_preemption_costs_the_time_until_the_next_new_token() -> None:
    recorder = TimelineRecorder(0.0)
    recorder.note_start(1.0)
    recorder.note_token(2.0, running=True)
    recorder.note_preemption(40, 3.0)
    recorder.note_token(3.5, running=False)  # from a step that was planned before
    assert recorder.awaits_token
    recorder.note_start(5.0)
    recorder.note_preemption(41, 5.5)
    recorder.note_token(8.0, running=True)
    found = recorder.timeline()
    assert found.scheduled == 1.0
    assert [(p.at, p.num_lost_tokens, p.seconds) for p in found.preemptions] == [(3.0, 40, 2.5), (5.5, 41, 2.5)]


def test_many_chunks_are_joined() -> None:
    recorder = TimelineRecorder(0.0)
    for index in range(MOST_CHUNKS + 10):
        recorder.note_chunk(index, 1, index, index + 1)
    chunks = recorder.timeline().prefill_chunks
    assert len(chunks) == MOST_CHUNKS
    assert sum(chunk.num_tokens for chunk in chunks) == MOST_CHUNKS + 10
    assert chunks[-1].at + chunks[-1].seconds == MOST_CHUNKS + 10
