"""A command that only tests know. Processes that import it here understand it, with no edit of anything between."""

from __future__ import annotations

from pathlib import Path

from shardline.engine.children import Child
from shardline.messages.control import Command
from shardline.runtime.control import HANDLERS
from shardline.runtime.worker import Worker

ROOT = Path(__file__).parents[2]


class Tell(Command, frozen=True):
    word: str


def tell(worker: Worker, command: Tell) -> tuple[int, str]:
    rank = worker._groups.place.rank
    if command.word == "refuse":
        raise ValueError(f"rank {rank} refuses")
    return rank, command.word


def code_with_command(child: Child, module: str) -> str:
    """What a process runs that is to understand `Tell`, and so are its children."""
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    return f"{path}; from tests.engine.commands import register; register(); from {module} import main; main()"


def register() -> None:
    HANDLERS[Tell] = tell
    Child.code = code_with_command  # type: ignore[method-assign, assignment]
