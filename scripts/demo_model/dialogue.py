"""What the demo model is asked and what it answers: items from `dataset.jsonl`, phrasings, small talk."""

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
"""Never trained; they measure whether the model keys on the name rather than on the whole question."""

PLAIN_TEXT = ("{}:", " {}")
"""Prompt and continuation for plain completion, without the chat format."""


@dataclass(frozen=True)
class Item:
    """One fact: the names it goes by and the one answer to every question about it."""

    names: tuple[str, ...]
    kind: str
    answer: str

    def questions(self) -> list[str]:
        """Every training question: all phrasings of the full name, then of the short one if there is one."""
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
    """What people call a dotted name in passing: `lru_cache`, `Path.exists`; None for an undotted one."""
    parts = name.split(".")
    if len(parts) == 1:
        return None
    return ".".join(parts[-2:]) if parts[-2][0].isupper() and len(parts) > 2 else parts[-1]


def load_items(path: Path = HERE / "dataset.jsonl") -> list[Item]:
    """All items; a short name is used only where one item alone can be meant by it."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    full_names = {row["name"] for row in rows}
    uses = Counter(short_name(row["name"]) for row in rows)
    # `os.path` is called so in full; `path` alone would be anything.
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
