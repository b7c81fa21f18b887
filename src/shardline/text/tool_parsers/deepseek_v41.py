"""DeepSeek V4.1: V4's format with spaces behind its mark."""

from __future__ import annotations

from shardline.text.tool_parsers import deepseek_v32
from shardline.text.tool_parsers.deepseek_v32 import DSML


class Parser(deepseek_v32.Parser):
    """`<｜DSML｜ calls><｜DSML｜ invoke name="…">…</｜DSML｜ invoke></｜DSML｜ calls>`."""

    other_names = ()
    begins = (f"<{DSML} calls>",)
    ends = (f"</{DSML} calls>",)
    invoke = f'<{DSML} invoke name="'
    invoke_end = f"</{DSML} invoke>"
    parameter = f'<{DSML} parameter name="'
    parameter_end = f"</{DSML} parameter>"
    template_marks = (DSML, begins[0])
    markers = (*begins, *ends, DSML)
