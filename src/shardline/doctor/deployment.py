"""Whether flags, model and hardware go together: what `shardline serve` would decide before it loads anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec

from shardline.checkpoints.description import read_models
from shardline.checkpoints.hub import find_local_model
from shardline.config.engine import EngineConfig
from shardline.deployment.layout import choose_layout
from shardline.deployment.machine import Host, Machine
from shardline.deployment.resolve import resolve
from shardline.doctor.facts import Finding, NodeFacts


def check_deployment(config: EngineConfig, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Resolve the layout on all nodes of a cluster, the head first; on a Ray cluster, only Ray knows the nodes."""
    if config.places_with_ray:
        return
    where, machine = nodes[0].name, Machine(tuple(_as_at_a_start(facts) for facts in nodes))
    model = nodes[0].model
    try:
        layout = choose_layout(config.parallel, machine)
        if not model.folder:
            return
        # The doctor asks no hub, not even for another tokenizer.
        local = dataclasses.replace(config.model, model=model.folder, tokenizer=None)
        second = config.scheduler.speculation.draft
        access = config.model.hub_access
        if second is not None and second.model and find_local_model(second.model, second.revision, access) is None:
            text = f"the draft model {second.model} is not on this node, so the layout was not checked"
            yield Finding(where, "layout", "warning", text, f"shardline download {second.model}")
            return
        deployment = resolve(config, read_models(dataclasses.replace(config, model=local)), machine)
    except (ValueError, OSError) as error:
        what, _, fix = str(error).partition("; ")
        yield Finding(where, "layout", "broken", what, fix or "change the flags that it names")
        return
    for warning in deployment.warnings:
        what, _, fix = warning.partition("; ")
        yield Finding(where, "layout", "warning", what, fix)
    if not deployment.warnings:
        text = f"ranks on {layout.device}: {layout.num_ranks}; tokens of a request: up to {deployment.max_model_len:,}"
        yield Finding(where, "layout", "ok", text)


def _as_at_a_start(facts: NodeFacts) -> Host:
    """The node's hardware; what a server that runs there already uses counts as free."""
    if not any(port.served for port in facts.ports):
        return facts.host
    devices = tuple(msgspec.structs.replace(device, memory_free=device.memory_total) for device in facts.host.devices)
    return msgspec.structs.replace(facts.host, free_memory=devices[0].memory_total, devices=devices)
