"""All substrings of several texts of tokens, as a suffix automaton.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), extended to several texts: each
begins at the root. A state stands for strings that end at the same places; its link leads to the longest of their
suffixes that end at further places. Appending a token and following one take constant time on average.
"""

from __future__ import annotations

from array import array

_EMPTY_BYTES, _STATE_BYTES, _BRANCHES_BYTES, _BRANCH_BYTES, _TOKEN_BYTES = 1000, 24, 400, 100, 5
"""What an index, a state, its second step, each further one and a token of a text take, with what arrays reserve."""
_NONE = -1


class SuffixIndex:
    """Texts, and where each of their substrings occurs."""

    def __init__(self) -> None:
        self._text = array("i")
        """The texts, with _NONE behind each."""
        self._link = array("i", [_NONE])
        self._length = array("i", [0])
        """That of a state's longest string."""
        self._end = array("i", [0])
        """Behind an occurrence of a state's strings in the text."""
        self._token, self._target = array("i", [_NONE]), array("i", [_NONE])
        """The first step from each state. Most states have no other one, and a dict for each would be large."""
        self._branches: dict[int, dict[int, int]] = {}
        """The other steps."""
        self._num_branches = 0
        self._last = 0
        """The state of the text that grows."""

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory."""
        states, branches = _EMPTY_BYTES + _STATE_BYTES * len(self._link), _BRANCHES_BYTES * len(self._branches)
        return states + branches + _BRANCH_BYTES * self._num_branches + _TOKEN_BYTES * len(self._text)

    def append(self, token: int) -> None:
        """Append a token to the text that grows."""
        self._text.append(token)
        length, at = self._length, self._last
        if (reached := self.step(at, token)) >= 0:  # another text has the same string
            reached = self._ending_at(at, token, reached)
            self._end[reached] = len(self._text)
        else:
            reached = self._add_state(length[at] + 1, 0)
            while at >= 0 and (other := self.step(at, token)) < 0:
                self._set_step(at, token, reached)
                at = self._link[at]
            if at >= 0:
                self._link[reached] = self._ending_at(at, token, other)
        self._last = reached

    def end_text(self) -> None:
        """End the text that grows; the next one begins with the next token."""
        self._text.append(_NONE)
        self._last = 0

    def step(self, state: int, token: int) -> int:
        """The state after a token; below 0: none of the state's strings is followed by it."""
        if self._token[state] == token:
            return self._target[state]
        branches = self._branches.get(state)
        return _NONE if branches is None else branches.get(token, _NONE)

    def find_continuation(self, state: int, limit: int) -> list[int]:
        """Up to `limit` tokens that followed a state's strings."""
        start = self._end[state]
        tokens = self._text[start : start + limit].tolist()
        return tokens[: tokens.index(_NONE)] if _NONE in tokens else tokens

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix of a string and a token that occurs: its state and length. The string is the one of this
        length among those of `state`, or was before other texts came."""
        links, lengths = self._link, self._length
        while state and length <= lengths[links[state]]:
            state = links[state]
        while (reached := self.step(state, token)) < 0:
            if state == 0:
                return 0, 0
            state = links[state]
            length = lengths[state]
        return reached, length + 1

    def _ending_at(self, at: int, token: int, reached: int) -> int:
        """The state of the longest string of `at` and the token, which is one of `reached`: a state of its own if that
        one has longer strings, too."""
        length = self._length[at] + 1
        if self._length[reached] == length:
            return reached
        state = self._add_state(length, self._link[reached])
        self._token[state], self._target[state] = self._token[reached], self._target[reached]
        if (branches := self._branches.get(reached)) is not None:
            self._branches[state] = dict(branches)
            self._num_branches += len(branches)
        self._link[reached] = state
        while at >= 0 and self.step(at, token) == reached:
            self._set_step(at, token, state)
            at = self._link[at]
        return state

    def _add_state(self, length: int, link: int) -> int:
        """A new state, whose strings end where the text ends."""
        self._length.append(length)
        self._link.append(link)
        self._end.append(len(self._text))
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _set_step(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (_NONE, token):
            self._token[state], self._target[state] = token, target
            return
        branches = self._branches.setdefault(state, {})
        self._num_branches += token not in branches
        branches[token] = target
