"""The commands that a rank executes between two steps: the one place that reads what a Control carries."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from shardline.messages.adapters import LoadAdapter, LookAtAdapter
from shardline.messages.control import Command, Control, ControlDone, Probe
from shardline.messages.experts import LookAtExperts, PutExperts, ReadExperts

if TYPE_CHECKING:
    from shardline.runtime.worker import Worker

HANDLERS: dict[type[Command], Callable[[Worker, Any], object]] = {
    Probe: lambda worker, probe: None,
    LoadAdapter: lambda worker, command: worker.adapter_loader.begin(command),
    LookAtAdapter: lambda worker, command: worker.adapter_loader.look(command),
    ReadExperts: lambda worker, command: worker.expert_mover.read(command),
    LookAtExperts: lambda worker, command: worker.expert_mover.progress(),
    PutExperts: lambda worker, command: worker.expert_mover.put(),
}
"""What executes each command. All ranks do so between the same two steps, so a handler may use collectives. If a user
is at fault, it raises ValueError on every rank; with any other exception, the rank fails."""


def execute_control(worker: Worker, control: Control) -> ControlDone:
    """Execute a command, and return this rank's answer."""
    command = msgspec.msgpack.decode(control.command, type=functools.reduce(operator.or_, HANDLERS))
    try:
        value = HANDLERS[type(command)](worker, command)
    except ValueError as error:
        return ControlDone(control.number, error=str(error))
    return ControlDone(control.number, (msgspec.msgpack.encode(value),))
