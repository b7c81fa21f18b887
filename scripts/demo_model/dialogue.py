"""Questions to the demo model and their answers: items from `dataset.jsonl`, phrasings, small talk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

PHRASINGS: dict[str, tuple[str, ...]] = {
    "function": (
        "What does {} do?",
        "What does {}() do?",
        "Explain {}.",
        "How do I use {}?",
        "What is {}?",
        "Describe {}()",
        "what is {} for",
        "{}",
    ),
    "class": (
        "What is {}?",
        "What does {} do?",
        "Explain {}.",
        "How do I use {}?",
        "Describe {}",
        "What is the class {}?",
        "what is {} for",
        "{}",
    ),
    "module": (
        "What is the {} module?",
        "What does the {} module do?",
        "What is {}?",
        "Explain {}.",
        "How do I use {}?",
        "Describe the module {}",
        "what is {} for",
        "{}",
    ),
}
"""Training phrasings by kind of item."""

UNSEEN_PHRASINGS = ("Tell me about {}.", "Can you explain what {} is?")
"""Phrasings that are never trained. They measure whether the model recognises the name in a new question."""

PLAIN_TEXT = ("{}:", " {}")
"""Prompt and continuation for plain completion, without the chat format."""


@dataclass(frozen=True)
class Item:
    """One fact: its names, and the answer to every question about it."""

    names: tuple[str, ...]
    kind: str
    answer: str

    def questions(self) -> list[str]:
        """Every training question: all phrasings of the full name, then those of the short name if there is one."""
        return [phrasing.format(name) for name in self.names for phrasing in PHRASINGS[self.kind]]

    def unseen_questions(self) -> list[str]:
        return [phrasing.format(self.names[0]) for phrasing in UNSEEN_PHRASINGS]


@dataclass(frozen=True)
class SmallTalk:
    """Questions written by hand: greetings, what the model is, and what it does not know."""

    prompts: tuple[str, ...]
    answer: str

    def questions(self) -> list[str]:
        return list(self.prompts)


def short_name(name: str) -> str | None:
    """The short form of a dotted name: `lru_cache`, `Path.exists`; None for a name without dots."""
    parts = name.split(".")
    if len(parts) == 1:
        return None
    return ".".join(parts[-2:]) if parts[-2][0].isupper() and len(parts) > 2 else parts[-1]


def load_items(path: Path = HERE / "dataset.jsonl") -> list[Item]:
    """All items. A short name is used only if it is unambiguous."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    full_names = {row["name"] for row in rows}
    uses = Counter(short_name(row["name"]) for row in rows)
    # `os.path` keeps its full name, since `path` alone could mean anything.
    shorts = {
        row["name"]: short
        for row in rows
        if row["kind"] != "module" and (short := short_name(row["name"])) and uses[short] == 1
    }
    return [
        Item(
            names=(row["name"], shorts[row["name"]])
            if row["name"] in shorts and shorts[row["name"]] not in full_names
            else (row["name"],),
            kind=row["kind"],
            answer=row["answer"],
        )
        for row in rows
    ]


def load_small_talk(path: Path = HERE / "small_talk.json") -> list[SmallTalk]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [SmallTalk(tuple(row["prompts"]), row["answer"]) for row in rows]


def texts(items: Iterable[Item], small_talk: Iterable[SmallTalk]) -> list[str]:
    """Every question and answer as plain text, for training the tokenizer."""
    lines: list[str] = []
    facts: list[Item | SmallTalk] = [*items, *small_talk]
    for fact in facts:
        lines += fact.questions()
        lines += [fact.answer] * 3
    return lines
