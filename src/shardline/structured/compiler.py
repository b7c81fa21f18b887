"""Grammars on a rank: compiled once each, and followed by one matcher per sequence."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardline.structured.grammar import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_WARM = 256
"""How many compiled grammars are kept."""

_END = "<|end of the grammar|>"
"""A token that no model has. A mask allows it where the answer may end."""


class Vocabulary:
    """The model's tokens, as grammars see them."""

    def __init__(self, tokenizer_file: str) -> None:
        import tokenizers
        from llguidance import LLTokenizer

        backend = tokenizers.Tokenizer.from_file(tokenizer_file)
        backend.add_special_tokens([_END])
        end_id = backend.token_to_id(_END)
        assert end_id is not None
        self.end_id = end_id
        self.tokenizer: LLTokenizer = LLTokenizer(backend.to_str(), eos_token=[self.end_id])
        self.num_words = -(-self.tokenizer.vocab_size // 32)
        """Length of a mask, in words of 32 bits."""


class GrammarCompiler:
    """Compiles grammars in a thread of its own, and keeps those that were used last."""

    def __init__(self, tokenizer_file: str) -> None:
        self._threads = ThreadPoolExecutor(1, "grammars")
        self._vocabulary = self._threads.submit(Vocabulary, tokenizer_file)
        self._warm: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def start_grammar(self, grammar: str) -> Matcher:
        """A matcher at the beginning of `grammar`. If it is not compiled yet, the matcher's first use waits for it."""
        compiled = self._warm.get(grammar)
        if compiled is None:
            compiled = self._warm[grammar] = self._threads.submit(self._compile, grammar)
            if len(self._warm) > _MAX_WARM:
                self._warm.popitem(last=False)
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
        self._unread: list[int] = []

    def append_token(self, token_id: int, *, is_end: bool) -> None:
        """Note the next token; `is_end`: it ends the answer."""
        self._unread.append(-1 if is_end else token_id)

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        matcher = self._catch_up()
        return matcher.is_stopped() and not matcher.is_error()

    def find_allowed(self) -> tuple[npt.NDArray[np.int32], bool]:
        """The tokens that may come next, as bits, and whether the answer may end here.

        Raises:
            ValueError: the grammar is too complex to go on, or the tokenizer cannot be used with grammars.
        """
        matcher, vocabulary = self._catch_up(), self._vocabulary.result()
        words = np.zeros(vocabulary.num_words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {matcher.get_error()}")
        end = vocabulary.end_id
        may_end = bool(words[end >> 5] >> (end & 31) & 1)
        words[end >> 5] &= ~np.int32(np.uint32(1 << (end & 31)).view(np.int32))
        return words, may_end

    def _catch_up(self) -> LLMatcher:
        """The matcher after all noted tokens."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        if self._unread:
            end = self._vocabulary.result().end_id
            tokens, self._unread = [end if token_id < 0 else token_id for token_id in self._unread], []
            if not (self._matcher.is_stopped() or self._matcher.is_error()):
                self._matcher.consume_tokens(tokens)
        return self._matcher
