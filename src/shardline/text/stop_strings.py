"""Stop strings in a text that arrives in pieces; one object per choice."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and holds back text that may begin one.

    If one character completes several stop strings, the longest one wins. The work per character is O(number of stop
    strings), by Knuth-Morris-Pratt.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: the text that is returned ends with the stop string."""
        self._stops = tuple(stops)
        self._include = include_stop
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.match: str | None = None
        """The stop string that was found; no text is returned after it."""

    def add_text(self, text: str) -> str:
        """Add the next piece; returns the text that can be shown, which never holds part of an excluded stop string."""
        if not self._stops:
            return text
        if self.match is not None:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._match_char(text[position])
            if stop is not None:
                self.match, self._held = stop, ""
                end = position + 1
                return text[: end if self._include else end - len(stop)]
        keep = max(self._matched)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush_text(self) -> str:
        """The text held back so far. Call it after the last piece."""
        held, self._held = self._held, ""
        return held

    def _match_char(self, char: str) -> str | None:
        """Advance the automaton of every stop string by one character; returns the longest completed one."""
        best: str | None = None
        for index, stop in enumerate(self._stops):
            length, failure = self._matched[index], self._failures[index]
            while length and stop[length] != char:
                length = failure[length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                best = stop if best is None or len(stop) > len(best) else best
                length = failure[length - 1]
            self._matched[index] = length
        return best


def _failure_table(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
