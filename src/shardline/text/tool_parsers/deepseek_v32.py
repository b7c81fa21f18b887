"""DeepSeek V3.2 and V4: invocations in DSML, whose parameters say whether they are strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shardline.text.tool_parsers import minimax_m2

DSML = "｜DSML｜"


class Parser(minimax_m2.Parser):
    """`<｜DSML｜parameter name="…" string="true">…</｜DSML｜parameter>`.

    V3.2 and V4 name the outer element differently.
    """

    other_names: ClassVar[tuple[str, ...]] = ("deepseek_v4",)
    begins: ClassVar[tuple[str, ...]] = (
        f"<{DSML}function_calls>",
        f"<{DSML}tool_calls>",
        f"<{DSML}toolcalls>",
        f"<{DSML}tool>",
    )
    ends: ClassVar[tuple[str, ...]] = (
        f"</{DSML}function_calls>",
        f"</{DSML}tool_calls>",
        f"</{DSML}toolcalls>",
        f"</{DSML}tool>",
    )
    invoke = f'<{DSML}invoke name="'
    invoke_end = f"</{DSML}invoke>"
    parameter = f'<{DSML}parameter name="'
    parameter_end = f"</{DSML}parameter>"
    key_ends: ClassVar[Mapping[str, bool]] = {
        '" string="true">': True,
        '" string="false">': False,
        minimax_m2.NAME_END: False,
    }
    template_marks: ClassVar[tuple[str, ...]] = (DSML,)
    markers: ClassVar[tuple[str, ...]] = (*begins, *ends, DSML)
