"""Grammars on a rank: compiled once each, and followed by one matcher per sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardline.structured.grammar import parser_limits
from shardline.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_FEW_MASKS = 4
"""Fewer masks than this are computed by the calling thread: they do not take longer than waking the others."""
_MAX_WARM_CHARS = 4 << 20
"""Length of all grammars whose compiled form is kept."""


class GrammarCompiler:
    """Compiles grammars in a thread of its own, and keeps those that were used last."""

    def __init__(
        self, tokenizer_file: str, read: Callable[[Path], bytes] = Path.read_bytes, num_threads: int = 1
    ) -> None:
        """`read` returns the tokenizer.json that the file is or contains. `num_threads`: threads that compute masks."""
        self._threads = ThreadPoolExecutor(1, "grammars")
        # Only the work is done beside the first steps; the file is read at once.
        self._vocabulary = self._threads.submit(Vocabulary, read(Path(tokenizer_file)))
        self._warm: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_chars = 0
        self._num_threads = num_threads

    @cached_property
    def _executor(self) -> LLExecutor:
        """The threads that compute masks; they are started for the first masks."""
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads)

    def compute_masks(self, matchers: Sequence[Matcher]) -> None:
        """Compute the masks that the `find_allowed` of these matchers will return, several at once."""
        waiting = [(matcher, own) for matcher in matchers if (own := matcher.next_to_mask()) is not None]
        if self._num_threads == 1 or len(waiting) < _FEW_MASKS:
            return  # find_allowed computes them
        words = np.empty((len(waiting), self._vocabulary.result().num_words), dtype=np.int32)
        places = [(own, index) for index, (_, own) in enumerate(waiting)]
        self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, words.strides[0], len(words))
        for (matcher, _), row in zip(waiting, words, strict=True):
            matcher.keep_mask(row)

    def start_grammar(self, grammar: str) -> Matcher:
        """A matcher at the beginning of `grammar`. If it is not compiled yet, the matcher's first use waits for it."""
        compiled = self._warm.get(grammar)
        if compiled is None:
            compiled = self._warm[grammar] = self._threads.submit(self._compile, grammar)
            self._num_chars += len(grammar)
            while self._num_chars > _MAX_WARM_CHARS:
                self._num_chars -= len(self._warm.popitem(last=False)[0])
        self._warm.move_to_end(grammar)
        return Matcher(compiled, self._vocabulary)

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        vocabulary = self._vocabulary.result()
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            # The first mask builds tables that all copies share.
            matcher.deep_copy().compute_bitmask()
        return matcher


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, compiled: Future[LLMatcher], vocabulary: Future[Vocabulary]) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._matcher: LLMatcher | None = None
        self._error = ""
        self._unread: list[int] = []
        self._next: npt.NDArray[np.int32] | None = None
        """The mask of the next token, if it has been computed."""

    def next_to_mask(self) -> LLMatcher | None:
        """The matcher after all noted tokens, if its next mask can be computed."""
        matcher = self._catch_up()
        return None if matcher is None or matcher.is_stopped() or matcher.is_error() else matcher

    def keep_mask(self, words: npt.NDArray[np.int32]) -> None:
        """Keep the mask of the next token for `find_allowed`."""
        self._next = words

    def append_token(self, token_id: int, *, is_end: bool) -> None:
        """Note the next token; `is_end`: it ends the answer."""
        self._unread.append(-1 if is_end else token_id)
        self._next = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        matcher = self._catch_up()
        return matcher is not None and matcher.is_stopped() and not matcher.is_error()

    def find_allowed(self) -> tuple[npt.NDArray[np.int32], bool]:
        """The tokens that may come next, as bits, and whether the answer may end here.

        Raises:
            ValueError: the grammar is too complex to go on, or the tokenizer cannot be used with grammars.
        """
        matcher = self._catch_up()
        if matcher is None:
            raise ValueError(f"the model's tokenizer cannot be used with grammars: {self._error}")
        vocabulary = self._vocabulary.result()
        words, self._next = self._next, None
        if words is None:
            words = np.zeros(vocabulary.num_words, dtype=np.int32)
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {matcher.get_error()}")
        end = vocabulary.end_id
        may_end = bool(words[end >> 5] >> (end & 31) & 1)
        words[end >> 5] &= ~np.int32(np.uint32(1 << (end & 31)).view(np.int32))
        return words, may_end

    def _catch_up(self) -> LLMatcher | None:
        """The matcher after all noted tokens; None: the vocabulary cannot be used."""
        if self._matcher is None and not self._error:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except Exception as error:  # llguidance and tokenizers raise plain exceptions
                self._error = str(error)
        if self._matcher is None:
            return None
        if self._unread:
            end = self._vocabulary.result().end_id
            tokens, self._unread = [end if token_id < 0 else token_id for token_id in self._unread], []
            if not (self._matcher.is_stopped() or self._matcher.is_error()):
                self._matcher.consume_tokens(tokens)
        return self._matcher
