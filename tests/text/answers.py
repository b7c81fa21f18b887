"""Answers with tool calls, as each format writes them, and how tests parse them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardline.text.answer_parser import AnswerParser
from shardline.text.reasoning_parsers import find_reasoning_parser
from shardline.text.tool_parsers import find_tool_parser
from shardline.text.tool_parsers.base import OfferedFunction

NAMES = ("weather", "f", "find_files")
TYPES = {"text": "string", "count": "integer", "share": "number", "on": "boolean", "list": "array", "thing": "object"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        **{name: {"type": kind} for name, kind in TYPES.items()},
        "maybe": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
        "any": {},
    },
    "$defs": {"word": {"type": "string"}},
}
FUNCTIONS = [OfferedFunction(name, PARAMETERS) for name in NAMES]


@dataclass
class Answer:
    """The joined deltas of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def join(parser: AnswerParser, pieces: list[str], cut: bool = False) -> Answer:
    answer = Answer()
    for delta in [*(parser.add_text(piece) for piece in pieces), parser.end_text(cut=cut)]:
        answer.reasoning += delta.reasoning
        answer.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(answer.calls), "calls begin in order, with their name"
                answer.calls.append((call.name, ""))
            name, arguments = answer.calls[call.index]
            answer.calls[call.index] = (name, arguments + call.arguments)
    assert parser.has_calls == bool(answer.calls)
    return answer


def parse(
    text: str,
    tools: str | None = None,
    reasoning: str | None = None,
    prompt: str = "",
    *,
    cut: bool = False,
    most_places: int = 10**6,
    **options: bool,
) -> Answer:
    """The answer in one piece; it must be the same in single characters and in two pieces, cut anywhere.

    `most_places`: for random texts, at about how many places they are cut, one after as many others as their length
    decides.
    """

    marks = find_tool_parser(tools).call_marks() if tools else None

    def make() -> AnswerParser:
        return AnswerParser(
            find_reasoning_parser(reasoning)(prompt, call_marks=marks) if reasoning else None,
            find_tool_parser(tools)(FUNCTIONS, **options) if tools else None,
        )

    whole = join(make(), [text], cut)
    assert join(make(), list(text), cut) == whole
    step = 1 + len(text) // most_places
    for place in range(len(text) % step, len(text) + 1, step):
        assert join(make(), [text[:place], text[place:]], cut) == whole, place
    return whole


def hermes(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama3_json(calls: list[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}' for name, arguments in calls)


def mistral(calls: list[tuple[str, str]]) -> str:
    return (
        "[TOOL_CALLS]["
        + ", ".join(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls)
        + "]"
    )


def mistral_v11(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def deepseek_v3(calls: list[tuple[str, str]]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[tuple[str, str]]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi_k2(calls: list[tuple[str, str]]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def gpt_oss(calls: list[tuple[str, str]]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


def gpt_oss_template(calls: list[tuple[str, str]]) -> str:
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>" for name, arguments in calls
    )


def _as_text(arguments: str) -> dict[str, str]:
    """Each argument as the formats with tags spell it: strings as they are, other values as JSON."""
    values = json.loads(arguments).items()
    return {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in values}


def glm4_moe(calls: list[tuple[str, str]], line: str = "\n", prefix: str = "") -> str:
    def enclose(words: str, text: str) -> str:
        return f"<{prefix}{words}>{text}</{prefix}{words}>"

    def argument(key: str, text: str) -> str:
        return f"{enclose('arg_key', key)}{line}{enclose('arg_value', text)}{line}"

    return line.join(
        enclose("tool_call", name + line + "".join(argument(key, text) for key, text in _as_text(arguments).items()))
        for name, arguments in calls
    )


def glm47_moe(calls: list[tuple[str, str]]) -> str:
    return glm4_moe(calls, "")


def minimax_m2(calls: list[tuple[str, str]]) -> str:
    inner = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in _as_text(arguments).items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def dots(calls: list[tuple[str, str]]) -> str:
    return minimax_m2(calls).replace("minimax:tool_call>", "dots_function_call>")


def muse_glimmer(calls: list[tuple[str, str]]) -> str:
    inner = minimax_m2(calls).replace("minimax:tool_call>", "atem:function_calls>")
    for tag in ("invoke", "parameter"):
        inner = inner.replace(f"<{tag}", f"<atem:{tag}").replace(f"</{tag}", f"</atem:{tag}")
    return inner


def deepseek_v32(calls: list[tuple[str, str]], outer: str = "function_calls", space: str = "") -> str:
    mark = f"｜DSML｜{space}"

    def parameter(key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        return f'<{mark}parameter name="{key}" string="{str(is_text).lower()}">{text}</{mark}parameter>\n'

    inner = "".join(
        f'<{mark}invoke name="{name}">\n'
        + "".join(parameter(key, value) for key, value in json.loads(arguments).items())
        + f"</{mark}invoke>\n"
        for name, arguments in calls
    )
    return f"<{mark}{outer}>\n{inner}</{mark}{outer}>"


def deepseek_v4(calls: list[tuple[str, str]]) -> str:
    return deepseek_v32(calls, "tool_calls")


def deepseek_v41(calls: list[tuple[str, str]]) -> str:
    return deepseek_v32(calls, "calls", " ")


def step3(calls: list[tuple[str, str]]) -> str:
    inner = "".join(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        + "".join(
            f'<steptml:parameter name="{key}">{text}</steptml:parameter>' for key, text in _as_text(arguments).items()
        )
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, arguments in calls
    )
    return f"<｜tool_calls_begin｜>{inner}<｜tool_calls_end｜>"


def minicpm5(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{text}</param>' for key, text in _as_text(arguments).items())
        + "</function>"
        for name, arguments in calls
    )


def minimax_m3(calls: list[tuple[str, str]]) -> str:
    mark = "]<]minimax[>["
    inner = "".join(
        f'{mark}<invoke name="{name}">'
        + "".join(f"{mark}<{key}>{text}{mark}</{key}>" for key, text in _as_text(arguments).items())
        + f"{mark}</invoke>"
        for name, arguments in calls
    )
    return f"{mark}<tool_call>{inner}{mark}</tool_call>"


def kimi_k3(calls: list[tuple[str, str]]) -> str:
    kinds = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}

    def argument(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = kinds.get(type(value), "number")
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'

    inner = "".join(
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        + "".join(argument(key, value) for key, value in json.loads(arguments).items())
        + "<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{inner}<|close|>tools<|sep|>"


def plamo3(calls: list[tuple[str, str]]) -> str:
    def enclose(words: str, text: str) -> str:
        return f"<|plamo:begin_{words}:plamo|>{text}<|plamo:end_{words}:plamo|>"

    inner = "".join(
        enclose(
            "tool_request",
            enclose("tool_name", name) + enclose("tool_arguments", f"<|plamo:constrain|>json<|plamo:msg|>{arguments}"),
        )
        for name, arguments in calls
    )
    return enclose("tool_requests", inner)


def hy_v3(calls: list[tuple[str, str]]) -> str:
    inner = glm4_moe([(f"{name}<tool_sep>", arguments) for name, arguments in calls])
    return f"<tool_calls>\n{inner}\n</tool_calls>"


def hy_v4(calls: list[tuple[str, str]]) -> str:
    return f"<tool_calls>\n{glm4_moe(calls)}\n</tool_calls>"


def k2_horizon(calls: list[tuple[str, str]]) -> str:
    inner = glm4_moe(calls, prefix="ifm|")
    return f"<ifm|tool_calls>\n{inner}\n</ifm|tool_calls>"


def k2_horizon_json(calls: list[tuple[str, str]]) -> str:
    inner = "\n".join(
        f'<ifm|tool_call>{{"name": {json.dumps(name)}, "arguments": {arguments}}}</ifm|tool_call>'
        for name, arguments in calls
    )
    return f"<ifm|tool_calls>{inner}</ifm|tool_calls>"


def qwen3_coder(calls: list[tuple[str, str]], tag: str = "tool_call", space: str = "\n") -> str:
    return "\n".join(
        f"<{tag}>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{space}{text}{space}</parameter>\n" for key, text in _as_text(arguments).items())
        + f"</function>\n</{tag}>"
        for name, arguments in calls
    )


def seed_oss(calls: list[tuple[str, str]]) -> str:
    return qwen3_coder(calls, "seed:tool_call", "")


def mimo(calls: list[tuple[str, str]]) -> str:
    return qwen3_coder(calls, space="")


def longcat(calls: list[tuple[str, str]]) -> str:
    return hermes(calls).replace("tool_call>", "longcat_tool_call>")


def granite_20b_fc(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<function_call> {{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls
    )


def internlm(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<|action_start|><|plugin|>\n{{"name": {json.dumps(name)}, "parameters": {arguments}}}\n<|action_end|>'
        for name, arguments in calls
    )


def _json_list(calls: list[tuple[str, str]]) -> str:
    objects = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
    return f"[{', '.join(objects)}]"


def granite(calls: list[tuple[str, str]]) -> str:
    return f"<|tool_call|>{_json_list(calls)}"


def jamba(calls: list[tuple[str, str]]) -> str:
    return f"<tool_calls>{_json_list(calls)}</tool_calls>"


def phi4_mini_json(calls: list[tuple[str, str]]) -> str:
    return f"functools{_json_list(calls)}"


def xlam(calls: list[tuple[str, str]]) -> str:
    return _json_list(calls)


def apertus(calls: list[tuple[str, str]]) -> str:
    objects = [f"{{{json.dumps(name)}: {arguments}}}" for name, arguments in calls]
    return f"<|tools_prefix|>[{', '.join(objects)}]<|tools_suffix|>"


def cohere_command3(calls: list[tuple[str, str]]) -> str:
    objects = [
        f'{{"tool_call_id": "{index}", "tool_name": {json.dumps(name)}, "parameters": {arguments}}}'
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>[\n{', '.join(objects)}\n]<|END_ACTION|>"


def gigachat3(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<|function_call|>{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls
    )


def inkling(calls: list[tuple[str, str]]) -> str:
    return "".join(
        f'<|content_invoke_tool_json|>{{"name": {json.dumps(name)}, "args": {arguments}}}<|end_message|>'
        for name, arguments in calls
    )


def _python_calls(calls: list[tuple[str, str]]) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(arguments).items())})"
        for name, arguments in calls
    ]


def pythonic(calls: list[tuple[str, str]]) -> str:
    return f"[{', '.join(_python_calls(calls))}]"


def olmo3(calls: list[tuple[str, str]]) -> str:
    lines = "\n".join(_python_calls(calls))
    return f"<function_calls>{lines}</function_calls>"


def lfm2(calls: list[tuple[str, str]]) -> str:
    return f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>"


def llama4_pythonic(calls: list[tuple[str, str]]) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def _gemma4_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma4_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_gemma4_key(key)}:{_gemma4_value(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def _gemma4_key(key: str) -> str:
    return key if key.isidentifier() else f'<|"|>{key}<|"|>'


def gemma4(calls: list[tuple[str, str]]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{_gemma4_value(json.loads(arguments))}<tool_call|>" for name, arguments in calls
    )


def functiongemma(calls: list[tuple[str, str]]) -> str:
    written = gemma4(calls).replace("<|tool_call>call:", "<start_function_call>call:")
    return written.replace("<tool_call|>", "<end_function_call>").replace('<|"|>', "<escape>")


WRITERS: dict[str, list[Callable[[list[tuple[str, str]]], str]]] = {
    "hermes": [hermes],
    "llama3_json": [llama3_json],
    "mistral": [mistral, mistral_v11],
    "deepseek_v3": [deepseek_v3, deepseek_v31],
    "kimi_k2": [kimi_k2],
    "gpt_oss": [gpt_oss, gpt_oss_template],
    "glm4_moe": [glm4_moe, glm47_moe],
    "minimax_m2": [minimax_m2],
    "qwen3_coder": [qwen3_coder],
    "seed_oss": [seed_oss],
    "mimo": [mimo],
    "longcat": [longcat],
    "granite_20b_fc": [granite_20b_fc],
    "internlm": [internlm],
    "granite": [granite],
    "jamba": [jamba],
    "phi4_mini_json": [phi4_mini_json],
    "pythonic": [pythonic],
    "olmo3": [olmo3],
    "lfm2": [lfm2],
    "gemma4": [gemma4],
    "apertus": [apertus],
    "cohere_command3": [cohere_command3],
    "deepseek_v32": [deepseek_v32, deepseek_v4],
    "deepseek_v41": [deepseek_v41],
    "dots": [dots],
    "functiongemma": [functiongemma],
    "gigachat3": [gigachat3],
    "hy_v3": [hy_v3],
    "hy_v4": [hy_v4],
    "inkling": [inkling],
    "k2_horizon": [k2_horizon, k2_horizon_json],
    "kimi_k3": [kimi_k3],
    "llama4_pythonic": [llama4_pythonic, pythonic],
    "minicpm5": [minicpm5],
    "minimax_m3": [minimax_m3],
    "muse_glimmer": [muse_glimmer],
    "plamo3": [plamo3],
    "step3": [step3],
    "xlam": [xlam],
}
