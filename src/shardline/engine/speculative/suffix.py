"""Guesses from a sequence itself and from earlier answers: what followed as many of its last tokens as possible.

The method is suffix decoding (Oliaro et al., 2024). Ours searches a sequence's own text as `ngram` does, and earlier
answers in suffix automata.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from shardline.config.speculation import Speculation, Suffixes
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.speculative.ngram import PromptLookup
from shardline.engine.speculative.suffix_index import SuffixIndex
from shardline.engine.speculative.text_proposer import TextProposer

Namespace = tuple[str, str]
"""Salt and owner: answers of other ones are never guessed from, since how fast guesses are right would tell them."""

_MOST_BYTES = 64 << 20
_INDEXED_AT_ONCE = 64
"""Tokens of ended answers that are indexed for each sequence of a plan: more than there are, and no step is held up by
them."""


class SuffixProposer(TextProposer):
    """A `TextProposer` that keeps the answers of sequences that have ended."""

    def __init__(self, config: Speculation) -> None:
        self._suffixes = suffixes = config.suffixes
        self._answers = Answers(suffixes.max_cached_requests)
        super().__init__(config, lambda sequence: SuffixLookup(suffixes, self._answers, self._namespace(sequence)))

    def _namespace(self, sequence: LiveSequence) -> Namespace:
        request = sequence.request
        return request.cache_salt, "" if self._suffixes.share else request.owner

    def begin_plan(self, num_sequences: int) -> None:
        """See `Proposer`."""
        super().begin_plan(num_sequences)
        self._answers.index(_INDEXED_AT_ONCE * num_sequences)

    def note_end(self, sequence: LiveSequence) -> None:
        """See `Proposer`."""
        super().note_end(sequence)
        self._answers.add(self._namespace(sequence), sequence.tokens[len(sequence.request.prompt_token_ids) :])


class Answers:
    """The latest answers of each namespace, bounded in number and bytes.

    What comes first leaves first: answers go into a young generation; when it has half of what is allowed, it is the
    old one, and the old one is dropped.
    """

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.generations: tuple[dict[Namespace, SuffixIndex], dict[Namespace, SuffixIndex]] = {}, {}
        """The young one and the old one."""
        self._num_young = self._young_bytes = 0
        self._waiting: deque[tuple[Namespace, array[int]]] = deque()
        """Answers that are not indexed yet."""
        self._num_waiting = 0
        """Their tokens."""
        self._num_read = 0
        """How many of the first one's are indexed."""

    def add(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        """Keep an answer, which `index` makes known."""
        num_waiting = self._num_waiting + len(tokens)
        if self._most and tokens and 4 * num_waiting < self._most_bytes // 8:
            self._waiting.append((namespace, array("i", tokens)))
            self._num_waiting = num_waiting

    def index(self, most: int) -> None:
        """Make up to `most` further tokens known."""
        while self._waiting and most > 0:
            namespace, tokens = self._waiting[0]
            if self._num_read == 0 or self._young_bytes >= self._most_bytes // 2:
                self._begin_text()
            young = self.generations[0]
            before = young[namespace].num_bytes if namespace in young else 0
            index = young.setdefault(namespace, SuffixIndex())
            part = tokens[self._num_read : self._num_read + most]
            for token in part:
                index.append(token)
            most -= len(part)
            self._num_read += len(part)
            if self._num_read == len(tokens):
                index.end_text()
                self._waiting.popleft()
                self._num_waiting -= len(tokens)
                self._num_read = 0
            self._young_bytes += index.num_bytes - before

    def _begin_text(self) -> None:
        """Make room for an answer."""
        if self._young_bytes >= self._most_bytes // 2 or self._num_young >= max(1, self._most // 2):
            self.generations = {}, self.generations[0] if self._most > 1 else {}
            self._num_young = self._young_bytes = 0
        self._num_young += 1


class SuffixLookup:
    """A `Lookup` of one sequence."""

    def __init__(self, suffixes: Suffixes, answers: Answers, namespace: Namespace) -> None:
        self._suffixes = suffixes
        self._answers = answers
        self._namespace = namespace
        self._own = PromptLookup(1, suffixes.max_tree_depth)
        self._matches: dict[SuffixIndex, tuple[int, int]] = {}
        """For each index, the state and the length of the longest suffix that occurs there."""
        self._num_read = 0

    def find_continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        """See `Lookup`."""
        depth, factor = self._suffixes.max_tree_depth, self._suffixes.max_spec_factor
        place, longest = self._own.find_match(tokens)
        best: SuffixIndex | None = None
        known, self._matches = self._matches, {}
        for generation in self._answers.generations:
            index = generation.get(self._namespace)
            if index is None:
                continue
            state, length = known.get(index, (0, 0))
            num_new = len(tokens) - self._num_read
            if index not in known or num_new > depth:
                state, length, num_new = 0, 0, depth
            for token in tokens[-num_new:] if num_new else ():
                state, length = index.follow(state, length, token)
            self._matches[index] = state, length
            if min(length, depth) > longest:
                best, place, longest = index, state, min(length, depth)
        self._num_read = len(tokens)
        limit = min(limit, max(1, int(factor * longest)))
        if longest == 0:
            return []
        return self._own.read(place, limit) if best is None else best.find_continuation(place, limit)
