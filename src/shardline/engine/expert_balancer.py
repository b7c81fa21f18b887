"""Moves experts between ranks while they serve, so that all ranks have as much to do (vLLM's EPLB)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from shardline.config.experts import ExpertBalancing
from shardline.deployment.deployment import Deployment
from shardline.engine.commands import Give
from shardline.engine.expert_balance import LayerPlaces, Load, Move
from shardline.messages.control import ControlDone
from shardline.messages.experts import ExpertProgress, LookAtExperts, PutExperts, ReadExperts
from shardline.messages.stats import ExpertMoves
from shardline.segment.expert_load import Counts

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
"""How often ranks are asked whether they have read what comes to them."""
_SHARE = 0.05
"""Share of the time in which steps may wait for experts that are put in place."""


class ExpertBalancer:
    """One move at a time: ranks read the experts that come to them beside the steps, then all change at once between
    two steps. The load of the last window decides about each move.
    """

    def __init__(
        self,
        balancing: ExpertBalancing,
        layers: Mapping[int, int],
        num_ranks: int,
        give: Give,
        read_load: Callable[[], Counts],
    ) -> None:
        """`layers`: the number of experts of each layer that has some. `give`: see `RankCommands.give`. `read_load`:
        see `Executor.expert_load`."""
        redundant = balancing.num_redundant_experts
        self._balancing = balancing
        self._places = {layer: LayerPlaces(count, count + redundant, num_ranks) for layer, count in layers.items()}
        self._original = {layer: LayerPlaces(count, count + redundant, num_ranks) for layer, count in layers.items()}
        self._give = give
        self._read_load = read_load
        self._num_steps = 0
        self._before: Counts | None = None
        """The load at the beginning of the window."""
        self._window: dict[int, Load] = {}
        """The load of each layer that may want a move, in the last window that is over."""
        self._whole_window: dict[int, Load] = {}
        """That of all layers."""
        self._move: Move | None = None
        """The move that ranks read experts for."""
        self._is_asked = False
        self._next_time = 0.0
        self._num_moves = 0
        self._attributed: Counts | None = None
        """The load that `_rank_load` has already."""
        self._rank_load: dict[int, Load] = {}

    def note_step(self) -> None:
        """A step is over."""
        now = time.monotonic()
        self._num_steps += 1
        self._watch_window()
        if self._move is None:
            if self._window and now >= self._next_time:
                self._begin_move()
        elif not self._is_asked and now >= self._next_time:
            self._is_asked = True
            self._give(LookAtExperts(), self._note_progress)

    def rank_load(self, counts: Counts) -> dict[int, Load]:
        """For each layer, the tokens of each rank's experts since the start. `counts`: the load since the start."""
        for layer, places in self._places.items():
            past = 0 if self._attributed is None else self._attributed[layer, : places.num_experts]
            load = places.rank_load((counts[layer, : places.num_experts] - past).astype(np.float64))
            self._rank_load[layer] = self._rank_load.get(layer, 0.0) + load
        self._attributed = counts.copy()
        return self._rank_load

    def stats(self) -> ExpertMoves:
        """What was moved, and what it is good for."""
        return ExpertMoves(self._num_moves, self._imbalance(self._original), self._imbalance(self._places))

    def _imbalance(self, places: Mapping[int, LayerPlaces]) -> float:
        """The busiest rank's load over the mean in the last window, averaged over layers."""
        loads = [places[layer].imbalance(load) for layer, load in self._whole_window.items() if load.sum()]
        return sum(loads) / len(loads) if loads else 1.0

    def _watch_window(self) -> None:
        """Look at the load at the beginning and at the end of a window."""
        interval = self._balancing.step_interval
        at = self._num_steps % interval
        if at == 0 and self._before is not None:
            self._decide(self._before)
        if at == max(0, interval - self._balancing.window_size):
            self._before = self._read_load().copy()

    def _decide(self, before: Counts) -> None:
        """The window that began with the load `before` is over: begin to move."""
        difference = (self._read_load() - before).astype(np.float64)
        self._whole_window = {layer: difference[layer, : places.num_experts] for layer, places in self._places.items()}
        self._window = dict(self._whole_window)
        if self._balancing.log_balancedness:
            moves = self.stats()
            _log.info(
                "experts: the busiest rank has %.2f times the mean load; %.2f if none had moved; %d moves so far",
                moves.imbalance,
                moves.unmoved_imbalance,
                moves.count,
            )

    def _begin_move(self) -> None:
        """Begin the best move of the layer that is least balanced."""
        while self._window:
            layer = max(self._window, key=lambda index: self._places[index].imbalance(self._window[index]))
            places, load = self._places[layer], self._window[layer]
            changes = places.best_changes(load) if places.needs_move(load) else ()
            if changes:
                self._move = Move(layer, changes)
                self._is_asked = True
                self._give(ReadExperts(layer, changes), self._note_begun)
                return
            del self._window[layer]

    def _note_begun(self, done: ControlDone) -> None:
        self._is_asked = False
        self._next_time = time.monotonic() + _LOOK_SECONDS

    def _note_progress(self, done: ControlDone) -> None:
        ranks = [msgspec.msgpack.decode(value, type=ExpertProgress) for value in done.values]
        if error := next((rank.error for rank in ranks if rank.error), ""):
            _log.warning("experts stay where they are: %s", error)
            self._window, self._move = {}, None
        elif all(rank.is_read for rank in ranks):
            self._give(PutExperts(), self._note_put)
            return
        self._is_asked = False
        self._next_time = time.monotonic() + _LOOK_SECONDS

    def _note_put(self, done: ControlDone) -> None:
        assert self._move is not None
        self.rank_load(self._read_load())
        self._places[self._move.layer].put(self._move.changes)
        self._num_moves += 1
        self._move, self._is_asked = None, False
        longest = max(msgspec.msgpack.decode(value, type=float) for value in done.values)
        self._next_time = time.monotonic() + longest / _SHARE


def open_balancer(deployment: Deployment, give: Give, read_load: Callable[[], Counts]) -> ExpertBalancer | None:
    """The balancer of an engine, see `ExpertBalancer`; None: its experts stay where they are."""
    if not deployment.expert_balancing.step_interval:
        return None
    routings = [layer.feed_forward.routing for layer in deployment.spec.layers]
    layers = {index: routing.num_experts for index, routing in enumerate(routings) if routing is not None}
    return ExpertBalancer(deployment.expert_balancing, layers, deployment.grid.expert, give, read_load)
