"""Write the tables of docs/from-vllm.md: what becomes of the flags, keywords and variables of vLLM.

python -m scripts.from_vllm
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from shardline.cli.flags import Parser, add_engine_flags, add_flags
from shardline.config.server import ServerConfig
from shardline.config.vllm import variable_table, vllm_options

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "from-vllm.md"
_SERVE_FLAGS = ROOT / "tests" / "config" / "vllm_serve_flags.json"
_SECTION = "<!-- {}: written by scripts/from_vllm.py -->\n"
_END = "<!-- end -->\n"


def same_flags() -> list[str]:
    """The long flags of `vllm serve` that `shardline serve` has itself, without their --no- forms."""
    parser = Parser()
    add_engine_flags(parser)
    add_flags(parser, ServerConfig, "server")
    parser.complete()
    theirs = json.loads(_SERVE_FLAGS.read_text(encoding="utf-8"))
    known = {name for name, action in parser._option_string_actions.items() if type(action).__name__ != "_VllmFlag"}
    return sorted(name for name in theirs if name in known and name.startswith("--") and not name.startswith("--no-"))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _flag(name: str, takes: str) -> str:
    return name.replace("-", "_") if takes == "keywords" else ("-" if len(name) <= 3 else "--") + name


def flag_table() -> str:
    """Each flag of vLLM, by what becomes of it and why."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for option in vllm_options().values():
        reason = option.reason
        if option.treatment == "only":
            reason = f"only {' or '.join(option.allowed)}: {reason}"
        by_reason.setdefault((option.treatment, reason), []).append(_flag(option.name, option.takes))
    words = {"part": "same", "nothing": "taken, no effect", "only": "one value", "refused": "refused"}
    lines = [_row("flags", "here", "why"), _row("---", "---", "---"), _row(_names(same_flags()), "same", "")]
    for treatment, word in words.items():
        lines += [_row(_names(names), word, why) for (one, why), names in by_reason.items() if one == treatment]
    return "".join(lines)


def variable_rows() -> str:
    """Each variable of vLLM, in the same way."""
    words = {"same": "same", "bounds": "a bound", "refused": "refused", "nothing": "no effect"}
    lines = [_row("variables", "here", "why"), _row("---", "---", "---")]
    for entry in variable_table():
        why = f"at most {entry.most} {entry.reason}; a lower bound is refused" if entry.most else entry.reason
        lines.append(_row(_names(entry.names), words[entry.treatment], why))
    return "".join(lines)


def with_tables(page: str) -> str:
    """The page with both tables as they are now."""
    for name, table in (("flags", flag_table()), ("variables", variable_rows())):
        before, start, after = page.partition(_SECTION.format(name))
        page = before + start + table + _END + after.partition(_END)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
