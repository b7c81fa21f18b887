"""`shardline top URL`: what a server or a router does, live in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardline import env

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_URL = "http://127.0.0.1:8000"
_ANSWER_SECONDS = 5.0
_SPARKS = "▁▂▃▄▅▆▇█"
_WIDE, _WIDEST = 120, 160
"""Columns of terminals that have room for all of a rank, and for the whole names of hosts and devices."""
_BAR = 8
"""Cells of a rank's bar where there is little room; else twice as many."""

Row = dict[str, Any]
"""A rank with what its replica and its host say; of a replica without ranks, the replica's part."""

SORTS: dict[str, tuple[str, Callable[[Row], Any], bool]] = {
    "r": ("rank", lambda row: (row["replica"], row["rank"]), False),
    "b": ("busy", lambda row: row["busy"], True),
    "w": ("waiting", lambda row: row["waiting"], True),
    "s": ("step", lambda row: row["step_seconds"] or 0.0, True),
    "k": ("KV use", lambda row: row["kv_usage"], True),
    "h": ("host", lambda row: (row["where"], row["replica"], row["rank"]), False),
}
"""Keys, what they sort by, and whether the largest comes first."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="what a server or a router does, live",
        description="Show replicas and ranks of a running server, or of all servers behind a router, once a second. "
        f"Keys: {', '.join(f'{key} sorts by {name}' for key, (name, _, _) in SORTS.items())}; the same key again turns "
        "the order round; q ends.",
    )
    parser.add_argument("url", nargs="?", default=_URL, help="the server or the router (default: %(default)s)")
    parser.add_argument("--api-key", help="its key (default: $SHARDLINE_API_KEY or $VLLM_API_KEY)")
    parser.add_argument("--sort", choices=[name for name, _, _ in SORTS.values()], default="rank", help="order of rows")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument("--json", action="store_true", help="with --once: print what the server says, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch until the user ends it.

    Raises:
        ValueError: the URL is none, or with --once the server refuses the key.
        RuntimeError: with --once, there is no server.
    """
    from rich.console import Console
    from rich.live import Live

    from shardline.benchmark.http_client import split_url

    split_url(args.url)
    if args.json and not args.once:
        raise ValueError("--json is for --once")
    if not 0.1 <= args.interval <= 3600.0:
        raise ValueError(f"--interval must be in [0.1, 3600] seconds, got {args.interval}")
    watch = Watch(args.url.rstrip("/"), args.api_key or env.api_key(), args.sort)
    console = Console(highlight=False)
    if args.once:
        watch.look()
        if args.json:
            print(json.dumps(watch.seen))
        else:
            console.print(watch.picture(console.width, with_keys=False))
        return 0
    if not console.is_terminal:
        while True:
            watch.try_to_look()
            with console.capture() as plain:
                console.print(watch.picture(console.width, with_keys=False))
            print(time.strftime("%H:%M:%S"), plain.get(), sep="\n", flush=True)
            time.sleep(args.interval)
    with _keys() as read_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            watch.try_to_look()
            deadline = time.monotonic() + args.interval
            while (left := deadline - time.monotonic()) > 0.0:
                live.update(watch.picture(console.width, with_keys=True), refresh=True)
                key = read_key(left)
                if key in ("q", "\x1b", "\x03"):
                    return 0
                watch.press(key)


class Watch:
    """What was seen last, and how it is shown. The server may go and come back meanwhile."""

    def __init__(self, url: str, key: str | None, sort: str) -> None:
        self.seen: dict[str, Any] | None = None
        self._url = url
        self._api_key = key
        self._sort = next(key for key, (name, _, _) in SORTS.items() if name == sort)
        self._is_reversed = False
        self._problem = ""
        self._speeds: deque[float] = deque(maxlen=60)

    def look(self) -> None:
        """Ask the server.

        Raises:
            ValueError: it refuses.
            RuntimeError: it cannot be reached, or does not say what it should.
        """
        from shardline.cli.chat_backends import open_url

        with open_url(self._url, "/cluster?history=false", self._api_key, timeout=_ANSWER_SECONDS) as answer:
            try:
                seen = json.load(answer)
                self._speeds.append(seen["rates"]["generation_tokens_per_second"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise RuntimeError(f"{self._url} has not said what /cluster must say ({error})") from None
        self.seen = seen

    def try_to_look(self) -> None:
        """Ask the server; if that fails, say so in the picture, and keep what was seen."""
        try:
            self.look()
            self._problem = ""
        except (ValueError, RuntimeError) as error:
            self._problem = str(error)
            self._speeds.append(0.0)

    def press(self, key: str) -> None:
        """Sort by what a key stands for; the same key again turns the order round."""
        if key in SORTS:
            self._is_reversed = key == self._sort and not self._is_reversed
            self._sort = key

    def rows(self) -> list[Row]:
        """The ranks, sorted."""
        _, by, is_falling = SORTS[self._sort]
        return sorted(_rows(self.seen or {}), key=by, reverse=is_falling != self._is_reversed)

    def picture(self, width: int, *, with_keys: bool) -> Group:
        """All of it, for rich, on a terminal of `width` columns."""
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = []
        if self._problem:
            parts.append(Text(f"{self._problem}; trying again", "bold red"))
        if self.seen is None:
            return Group(*parts or [Text(f"asking {self._url}")])
        parts.append(self._summary(self.seen, width))
        parts += [Text(f"! {notice}", "yellow") for notice in self.seen["notices"]]
        parts += _backend_lines(self.seen.get("backends", ()))
        parts.append(self._table(width))
        if with_keys:
            keys = "  ".join(f"{key} {name}" for key, (name, _, _) in SORTS.items())
            parts.append(Text(f"sort: {keys}   q end", "dim"))
        return Group(*parts)

    def _summary(self, seen: dict[str, Any], width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        rates, first = seen["rates"], seen["first_token"]
        state = "gone" if self._problem else seen["state"]
        grid = Table.grid(padding=(0, 3 if width >= _WIDE else 1))
        speeds = list(self._speeds)[-max(4, width - 90) :]
        grid.add_row(
            Text(seen["model"] or self._url, "bold"),
            Text(state, "green" if state == "ready" else "red" if state in ("gone", "dead") else "yellow"),
            f"up {_duration(seen['uptime_seconds'])}",
            f"{rates['running']} running",
            Text(f"{rates['waiting']} waiting", "yellow" if rates["waiting"] else ""),
        )
        grid.add_row(
            Text(sparkline(speeds), "blue"),
            Text(f"{rates['generation_tokens_per_second']:,.1f} tokens/s", "bold"),
            f"prompts {rates['prompt_tokens_per_second']:,.0f}/s",
            f"first token {_seconds(first['p50'])}, p95 {_seconds(first['p95'])}",
            f"KV {_percent(rates['kv_usage'])}  hits {_percent(rates['hit_rate'])}",
        )
        return grid

    def _table(self, width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        is_wide = width >= _WIDE
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        right = ("replica", "rank", "pp", "tp", "cp", "step")
        limits = (None, None) if width >= _WIDEST else (16, 12) if is_wide else (12, 6)
        most = dict(zip(("host", "device"), limits, strict=True))
        memory = ("memory",) if is_wide else ()
        for name in (*right[:2], "host", "device", *right[2:5], "busy", "", "waits", "step", "KV use", *memory):
            justify: Literal["right", "left"] = "right" if name in right else "left"
            table.add_column(name, justify=justify, no_wrap=True, max_width=most.get(name))
        cells = _BAR * (1 + is_wide)
        for row in self.rows():
            dim = "" if row["alive"] and not self._problem else "dim"
            busy, waits = round(cells * row["busy"]), round(cells * row["waiting"])
            bar = Text("█" * busy, "blue") + Text("█" * min(waits, cells - busy), "yellow")
            bar += Text("·" * (cells - len(bar)), "dim")
            if not row["alive"]:
                bar = Text("down", "red")
            place = (str(row[name]) for name in ("replica", "rank", "where", "device", "pp", "tp"))
            table.add_row(
                *place,
                str(row.get("cp", "")),
                bar,
                f"{row['busy']:4.0%}",
                f"{row['waiting']:4.0%}",
                _seconds(row["step_seconds"]),
                f"{row['kv_usage']:4.0%}",
                *(row[name] for name in memory),
                style=dim,
            )
        return table


def _rows(seen: dict[str, Any]) -> Iterator[Row]:
    from shardline.config.fields import format_bytes

    hosts = seen.get("hosts", [])
    for replica in seen.get("replicas", []):
        own = {"replica": replica["index"], "alive": replica["alive"], "kv_usage": replica["rates"]["kv_usage"]}
        for rank in replica["ranks"]:
            memory = f"{format_bytes(rank['weight_bytes'])} + {format_bytes(rank['kv_bytes'])}"
            yield {**rank, **own, "where": hosts[rank["host"]]["name"], "memory": memory}
        if not replica["ranks"]:
            nothing = {"rank": -1, "where": replica.get("backend", ""), "device": "", "pp": "", "tp": "", "memory": ""}
            yield {**nothing, **own, "busy": 0.0, "waiting": 0.0, "step_seconds": replica["rates"]["step_seconds"]}


def _backend_lines(backends: Sequence[dict[str, Any]]) -> list[Any]:
    from rich.text import Text

    lines = []
    for one in backends:
        problem = one["problem"] or ("" if one["has_view"] else "says nothing of its ranks")
        style = "green" if one["state"] == "ready" else "yellow" if one["state"] in ("busy", "draining") else "red"
        lines.append(
            Text(f"{one['state']:9s}", style) + Text(f"{one['requests']:4d} in flight  {one['url']}  {problem}")
        )
    return lines


def sparkline(values: Sequence[float]) -> str:
    """The values as bars, the largest one full."""
    top = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(len(_SPARKS) * max(0.0, value) / top))] for value in values)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1e3 * value:.1f} ms" if value < 1.0 else f"{value:.2f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{int(seconds)} s" if minutes < 1 else f"{minutes} min" if hours < 1 else f"{hours} h {minutes % 60} min"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits some seconds for a key; without a terminal it waits only."""
    fd, is_terminal = sys.stdin.fileno(), sys.stdin.isatty()

    def read(seconds: float) -> str:
        watched = [fd] if is_terminal else []
        return os.read(fd, 8).decode(errors="ignore") if select.select(watched, [], [], seconds)[0] else ""

    if not is_terminal:
        yield read
        return
    import termios
    import tty

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield read
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
