"""Stop strings in a stream: text is held back while it may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, whatever the pieces in which the text comes.

    Of several completed by the same character, the longest wins. Work per character is O(number of stop strings).
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found; nothing more comes out after it."""

    def append(self, text: str) -> str:
        """Take the next piece and return what can be shown: never a part of a stop string, unless it is included."""
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._advance(text[position])
            if stop is not None:
                self.found, self._held = stop, ""
                end = position + 1
                return text[: end if self._include else end - len(stop)]
        keep = max(self._matched)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every stop string's automaton (Knuth-Morris-Pratt); the longest completed one."""
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
    """Per prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table
