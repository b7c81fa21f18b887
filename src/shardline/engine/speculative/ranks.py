"""Drafts by a model on ranks of its own, which guess on while the first model's steps run.

The draft model is an engine beside the engine: it has a scheduler, a KV cache and prefixes of its own, and each of its
requests goes on with the tokens of one sequence, a few drafts far. Guesses that turn out right are used as they come,
and nothing waits for them. PEARL (Liu et al., 2024) drafts while the target verifies, too.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from shardline.config.speculation import Speculation
from shardline.deployment.deployment import Deployment
from shardline.engine.client import EngineClient
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.text_proposer import TextProposer
from shardline.engine.start import StartedEngine, start_engine
from shardline.messages.engine import EngineFailed, EngineOutputs
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams

_AHEAD = 4
"""A request of the draft model gets so many full drafts."""
_MOST_BEHIND = 8
"""Tokens by which a request may lag behind its sequence; beyond, a new one is faster, which computes many at once."""

_log = logging.getLogger(__name__)


@dataclass
class Continuation:
    """What the draft model thinks comes after some tokens."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    """So far; another thread appends to it."""
    is_over: bool = False


class DraftRanks:
    """The engine of a draft model. If it fails, nothing is guessed any more, and the first model goes on alone."""

    def __init__(
        self,
        deployment: Deployment,
        start: Callable[[Deployment, int, bytes], StartedEngine] = start_engine,
    ) -> None:
        """Start the engine's process; `wait_ready` waits for it."""
        self.vocab_size, self.max_model_len = deployment.spec.vocab_size, deployment.max_model_len
        self._numbers = itertools.count()
        self._open: dict[str, Continuation] = {}
        self._has_failed = False
        self._client = EngineClient(deployment, 0, self._take, start, secrets.token_bytes(32))

    def wait_ready(self) -> list[str]:
        """Wait until the draft model is loaded; returns the lines of its start-up report.

        Raises:
            ValueError: its configuration is at fault.
            RuntimeError: its engine failed.
        """
        return self._client.wait_ready().report

    def begin(self, tokens: Sequence[int], count: int, salt: str) -> Continuation | None:
        """Ask for `count` tokens behind `tokens`, all of which the draft model must know. `salt`: see `Request`. None:
        they would be too many, or nobody answers any more."""
        count = min(count, self.max_model_len - len(tokens))
        if self._has_failed or count <= 0:
            return None
        request_id = str(next(self._numbers))
        continuation = self._open[request_id] = Continuation(request_id)
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=0)
        request = Request(
            request_id=request_id, prompt_token_ids=list(tokens), sampling=sampling, cache_salt=salt, streamed=True
        )
        self._client.add([request])
        return continuation

    def end(self, continuation: Continuation) -> None:
        """Give up what is missing of a continuation."""
        if self._open.pop(continuation.request_id, None) is not None:
            self._client.abort([continuation.request_id])

    def close(self) -> None:
        """End the engine."""
        self._client.close()

    def _take(self, message: EngineOutputs | EngineFailed) -> None:
        """Called by the client's thread."""
        if isinstance(message, EngineFailed):
            self._has_failed = True
            self._open.clear()
            _log.warning(
                "the ranks of the draft model have failed, so nothing is drafted any more: %s", message.message
            )
            return
        for output in message.outputs:
            if (continuation := self._open.get(output.request_id)) is None:
                continue
            continuation.token_ids.extend(output.token_ids)
            if output.finish_reason is not None:
                continuation.is_over = True
                self._open.pop(output.request_id, None)


class Guesses:
    """A `text_proposer.Lookup` of one sequence."""

    def __init__(self, ranks: DraftRanks, most: int, vocab_size: int, salt: str) -> None:
        """`most`: tokens of a draft; `vocab_size`: of the first model."""
        self._ranks, self._most, self._salt = ranks, most, salt
        self._vocab_size = vocab_size
        self._continuation: Continuation | None = None
        self._base = 0
        """The sequence's tokens when `_continuation` began."""
        self._before: list[int] = []
        """Guesses that lie between these and the continuation."""
        self._num_known = 0
        """The sequence's first tokens that the draft model has in its vocabulary."""

    def find_continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See `Lookup`. None are there yet if the last tokens were not those that the draft model had guessed."""
        self.follow(tokens)
        return (self._ready(tokens) or [])[:limit]

    def follow(self, tokens: Sequence[int]) -> None:
        """Have the draft model go on behind the tokens, unless it does."""
        ready = self._ready(tokens)
        if ready is None:
            self._begin(tokens, [])
        elif self._continuation is not None and self._continuation.is_over and len(ready) < 2 * self._most:
            self._begin(tokens, ready)

    def close(self) -> None:
        """Guess nothing more."""
        if self._continuation is not None:
            self._ranks.end(self._continuation)
            self._continuation = None

    def _ready(self, tokens: Sequence[int]) -> list[int] | None:
        """Guesses behind the tokens; None: what the draft model computes is of no use."""
        if self._continuation is None:
            return None
        guessed = [*self._before, *self._continuation.token_ids]
        known = list(tokens[self._base :])
        common = min(len(known), len(guessed))
        if known[:common] != guessed[:common] or len(known) - common > _MOST_BEHIND:
            return None
        ready = guessed[len(known) :]
        # Ids behind the vocabulary only pad the draft model's.
        return next((ready[:place] for place, token in enumerate(ready) if token >= self._vocab_size), ready)

    def _begin(self, tokens: Sequence[int], guesses: list[int]) -> None:
        """Have the draft model go on behind the tokens and some guesses."""
        self.close()
        if any(token >= self._ranks.vocab_size for token in tokens[self._num_known :]):
            return
        self._num_known = len(tokens)
        self._base, self._before = len(tokens), guesses
        self._continuation = self._ranks.begin([*tokens, *guesses], _AHEAD * self._most, self._salt)


class RankProposer(TextProposer):
    """A `TextProposer` whose guesses are those of ranks of their own."""

    def __init__(self, config: Speculation, ranks: DraftRanks, vocab_size: int) -> None:
        """`vocab_size`: of the first model."""
        self._lookups: WeakKeyDictionary[LiveSequence, Guesses] = WeakKeyDictionary()

        def look_up(sequence: LiveSequence) -> Guesses:
            guesses = Guesses(ranks, config.num_speculative_tokens, vocab_size, sequence.request.cache_salt)
            self._lookups[sequence] = guesses
            return guesses

        super().__init__(config, look_up, longest_search_pause=0)

    def propose(
        self, sequence: LiveSequence, limit: int, new_tokens: Sequence[int] = (), guesses: Sequence[int] = ()
    ) -> list[int]:
        """See `Proposer`. The ranks keep up with the sequence also in steps that have no draft."""
        if self._payoff.is_open:
            self._find(sequence)
            self._lookups[sequence].follow([*sequence.tokens, *new_tokens] if new_tokens else sequence.tokens)
        return super().propose(sequence, limit, new_tokens, guesses)

    def note_end(self, sequence: LiveSequence) -> None:
        """See `Proposer`."""
        super().note_end(sequence)
        if (guesses := self._lookups.pop(sequence, None)) is not None:
            guesses.close()
