"""A few faults under streaming `openai` clients; tests/faults/chaos.py causes many more."""

from __future__ import annotations

from pathlib import Path

from tests.faults.chaos import AnyFault, Report
from tests.faults.chaos_faults import Fault
from tests.faults.chaos_pairs import Pair, PairChaos

FAULTS: list[AnyFault] = [
    Pair("kill rank", "kill", "engine"),
    Fault("kill", "engine", "loading"),
    Fault("kill", "head", "idle"),
    Pair("descriptors front", "kill", "rank"),
    Fault("kill", "head", "busy"),
    Pair("memory node", "kill", "engine"),
    Fault("stop", "rank", "busy"),
]
"""Each process and each state, mostly by kills, which are over soon; `make chaos` has every kind and all pairs."""
LAYOUT = ("-dp", "2", "-pp", "2", "--step-timeout", "5")
"""A stall is noticed after half of the usual time."""
PAUSE = 0.5
"""Seconds of each client after an answer, so that the machine has time for other tests: a server need not be at its
limit for streams to be in the middle when a fault comes."""


def test_no_stream_hangs_and_no_token_is_wrong_doubled_or_lost(tmp_path: Path) -> None:
    report = PairChaos(tmp_path, seed=1, layout=LAYOUT, pause=PAUSE).run(FAULTS, num_clients=3)
    assert not report.wrong, "\n".join(report.lines())
    assert report.num_faults == len(FAULTS)
    assert report.answers > 10


def test_a_report_is_kept_for_the_next_run(tmp_path: Path) -> None:
    report = Report.load(tmp_path / "report.json")
    assert (report.tried, report.num_faults) == (0, 0)
    report.named["kill rank, busy"].append(0.5)
    report.tried, report.left, report.answers = 1, 4, 7
    report.late.append("kill rank, busy: named after 0.5 s")
    report.save(tmp_path / "report.json")
    again = Report.load(tmp_path / "report.json")
    assert again == report
    again.named["stop rank, busy"].append(4.0)
    assert again.lines()[-1] == "PASSED, 4 faults are left, 1 late"
