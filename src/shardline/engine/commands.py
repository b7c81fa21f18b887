"""Commands that the engine gives to its ranks by itself, between two steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from shardline.engine.executor.base import Executor
from shardline.messages.control import Command, Control, ControlDone

Answered = Callable[[ControlDone], None]
Give = Callable[[Command, Answered], None]
"""See `RankCommands.give`."""


class RankCommands:
    """The commands that all ranks have not answered yet, and what follows their answers."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._numbers = itertools.count(-1, -1)
        self.awaited: dict[int, Answered] = {}
        """What follows the answers to the commands that some rank has not answered, by number."""

    def give(self, command: Command, answered: Answered) -> None:
        """Hand a command to all ranks, behind the steps that have been submitted; `answered` is called by `settle`."""
        control = Control.carry(next(self._numbers), command)
        self.awaited[control.number] = answered
        self._executor.submit_control(control)

    def settle(self) -> None:
        """Go on with the commands that all ranks have answered."""
        for done in self._executor.answers.take(own=True):
            self.awaited.pop(done.number)(done)
