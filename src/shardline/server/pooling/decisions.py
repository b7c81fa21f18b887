"""POST /v1/systemone, vLLM's structured decisions: a model that generates answers questions about a state.

Each question is a chat of its own, whose answer is one token that stands for an option. The probabilities of these
tokens decide, and the prompts share the state.
"""

from __future__ import annotations

import json
import math
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.responses import Response

from shardline.api.outputs import RequestOutput
from shardline.server.documentation import json_answers
from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel, StrictRoute, check_template_values
from shardline.server.openai.chat.conversation import ConversationFields
from shardline.server.openai.chat.messages import ChatMessage
from shardline.server.openai.ignored_fields import IgnoredFields
from shardline.server.openai.named_tokens import named_logprobs, score_named
from shardline.server.openai.protocol import refuse_if
from shardline.server.service import Service, new_id
from shardline.text.tokenizer import Tokenizer

MAX_QUESTIONS = 64
_MAX_TAIL = 64
"""So many tokens of a prompt decide how the next one is spelled."""

Option = tuple[str, str | None]
"""Its name and its description."""


@dataclass(frozen=True)
class _Kind:
    """A type of questions. `labels`: what stands for the options in a reply."""

    labels: Sequence[str]
    request: str
    """The last line of the question."""
    read_options: Callable[[Any], list[Option]]
    """Raises ValueError: the criteria have another form."""
    write_option: Callable[[str, Option], str]
    """The line of an option with a label."""
    answer: Callable[[Sequence[Option], list[float]], dict[str, Any]]
    """What the probabilities of the options, among the options, say."""


def _described(label: str, option: Option) -> str:
    name, description = option
    return f"{label}: {name} - {description}" if description else f"{label}: {name}"


def _read_choices(criteria: Any) -> list[Option]:
    if not isinstance(criteria, dict) or not criteria:
        raise ValueError("its criteria must map the names of options to a description or null")
    return [(name, None if text is None else str(text)) for name, text in criteria.items()]


def _read_sides(criteria: Any) -> list[Option]:
    if criteria is not None and not (isinstance(criteria, dict) and criteria.keys() <= {"true", "false"}):
        raise ValueError("its criteria must be an object with 'true' and 'false'")
    texts = [(criteria or {}).get(side) for side in ("true", "false")]
    return [(name, None if text is None else str(text)) for name, text in zip(("yes", "no"), texts, strict=True)]


def _read_levels(criteria: Any) -> list[Option]:
    if not isinstance(criteria, list) or len(criteria) < 2:
        raise ValueError("its criteria must be an ordered list of levels, at least two")
    return [(str(level), None) for level in criteria]


def _answer_choice(options: Sequence[Option], shares: list[float]) -> dict[str, Any]:
    names = [name for name, _ in options]
    return {"choice": names[shares.index(max(shares))], "probabilities": dict(zip(names, shares, strict=True))}


def _answer_sides(options: Sequence[Option], shares: list[float]) -> dict[str, Any]:
    return {"noul": shares[0], "probabilities": {"yes": shares[0], "no": shares[1]}}


def _answer_level(options: Sequence[Option], shares: list[float]) -> dict[str, Any]:
    return {
        "score": math.fsum(level * share for level, share in enumerate(shares)),  # the mean level, from 0
        "legend": {str(level): name for level, (name, _) in enumerate(options)},
        "probabilities": {str(level): share for level, share in enumerate(shares)},
    }


_KINDS = {
    "choice": _Kind(
        string.ascii_uppercase, "Answer with the letter of one option only.", _read_choices, _described, _answer_choice
    ),
    "noul": _Kind(
        ("yes", "no"),
        "Answer with yes or no only.",
        _read_sides,
        lambda label, option: f"{label}: {option[1]}" if option[1] else label,
        _answer_sides,
    ),
    "score": _Kind(string.digits, "Answer with the number of one level only.", _read_levels, _described, _answer_level),
}


class QuestionFields(RequestModel):
    """A question: `instructions` are its text, and `criteria` its options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    instructions: Any = ""
    criteria: Any = None


class DecisionRequest(IgnoredFields):
    """The body of POST /v1/systemone."""

    state: Any
    """What the questions are about: text or JSON."""
    questions: Annotated[dict[str, QuestionFields], Field(min_length=1)]
    instructions: str | None = None
    """The message of the role "system"."""
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def conversation(self) -> ConversationFields:
        """How the messages become a prompt. The answer begins behind it, so the model must not think.

        Raises:
            ApiError: 400, the model is asked to think.
        """
        variables = {"enable_thinking": False, "thinking": False, **(self.chat_template_kwargs or {})}
        refuse_if(
            bool(variables["enable_thinking"] or variables["thinking"]),
            "chat_template_kwargs",
            "A decision is the first token of a reply, so thinking must be off.",
        )
        return ConversationFields(chat_template_kwargs=variables)

    def read_questions(self) -> list[Question]:
        """The questions, in their order.

        Raises:
            ApiError: 400, one is malformed, or there are too many, or media, which no model here takes.
        """
        for name in ("images", "audio", "videos"):
            refuse_if(bool(getattr(self, name)), name, f"This model takes text only, and no {name}.")
        if len(self.questions) > MAX_QUESTIONS:
            raise bad_request(f"questions: at most {MAX_QUESTIONS} are taken in one request.", "questions")
        return [Question.read(name, fields) for name, fields in self.questions.items()]


@dataclass(frozen=True)
class Question:
    """One question, with what stands for its options."""

    name: str
    kind: str
    text: str
    labels: Sequence[str]
    options: list[Option]

    @classmethod
    def read(cls, name: str, fields: QuestionFields) -> Question:
        """The question of this name.

        Raises:
            ApiError: 400, it is malformed.
        """
        kind = _KINDS.get(fields.type)
        if not name:
            raise bad_request("The name of a question must not be empty.", "questions")
        if fields.model_extra:
            raise bad_request(f"question {name!r}: unknown field(s) {sorted(fields.model_extra)}", "questions")
        if kind is None:
            raise bad_request(f"question {name!r}: its type must be one of {', '.join(_KINDS)}.", "questions")
        try:
            options = kind.read_options(fields.criteria)
        except ValueError as error:
            raise bad_request(f"question {name!r}: {error}.", "questions") from error
        if len(options) > len(kind.labels):
            raise bad_request(f"question {name!r}: at most {len(kind.labels)} options are possible.", "questions")
        if len({option for option, _ in options}) < len(options):
            raise bad_request(f"question {name!r}: two options have the same name.", "questions")
        labels = kind.labels[: len(options)]
        lines = [f"Question: {fields.instructions}"] if fields.instructions else []
        lines += map(kind.write_option, labels, options)
        return cls(name, fields.type, "\n".join([*lines, kind.request]), labels, options)

    def answer(self, label_ids: Sequence[int], output: RequestOutput) -> tuple[dict[str, Any], Diagnostics]:
        """What the model says, and how sure it is that it answers the question."""
        by_token = named_logprobs(output)
        logprobs = [by_token[label] for label in label_ids]
        weights = [math.exp(logprob - max(logprobs)) for logprob in logprobs]
        shares = [weight / math.fsum(weights) for weight in weights]
        mass = math.fsum(map(math.exp, logprobs))
        answer = {"type": self.kind, **_KINDS[self.kind].answer(self.options, shares)}
        answer["confidence"] = max(shares) * mass
        return answer, Diagnostics(mass, output.outputs[0].token_ids[0] in label_ids)


class Diagnostics(msgspec.Struct, frozen=True):
    """`label_mass`: how likely the reply is an option at all. `argmax_is_label`: whether the likeliest one is."""

    label_mass: float
    argmax_is_label: bool


class DecisionUsage(msgspec.Struct, frozen=True):
    """Number of tokens of all prompts, and of all replies."""

    input_tokens: int
    output_tokens: int


class DecisionResponse(msgspec.Struct, kw_only=True, frozen=True):
    """The answers, by the names of the questions."""

    id: str
    object: str = "structured_decision"
    created: int
    model: str
    answers: dict[str, dict[str, Any]]
    usage: DecisionUsage
    diagnostics: dict[str, Diagnostics]


def _find_labels(tokenizer: Tokenizer, prompt: Sequence[int], labels: Sequence[str]) -> list[int]:
    """The token that each label is as the first one behind a prompt.

    Raises:
        ApiError: 400, a label is several tokens there.
    """
    added = set(tokenizer.get_added_vocab().values())
    start = max((place + 1 for place, token_id in enumerate(prompt) if token_id in added), default=0)
    text = tokenizer.decode(prompt[max(start, len(prompt) - _MAX_TAIL) :])
    before, *spelled = tokenizer.encode_texts([text, *(text + label for label in labels)], False)
    found: list[int] = []
    for label, ids in zip(labels, spelled, strict=True):
        if ids[:-1] != before or ids[-1] in found:
            raise bad_request(
                f"The model's tokenizer has no token for {label!r} at the beginning of a reply, so it cannot decide."
            )
        found.append(ids[-1])
    return found


def decision_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/systemone", responses=json_answers(DecisionResponse))
    async def create_decision(body: DecisionRequest) -> Response:
        """What the model answers to each question about the state."""
        service.require_model(body.model)
        mode = service.llm.config.model.logprobs_mode
        refuse_if(mode.endswith("logits"), "model", f"Decisions need probabilities, and not --logprobs-mode {mode}.")
        questions, fields = body.read_questions(), body.conversation
        if isinstance(body.state, list | dict):
            check_template_values("state", body.state)
        state = body.state if isinstance(body.state, str) else json.dumps(body.state, ensure_ascii=False)
        system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
        prompts, labels = [], []
        for question in questions:
            asked = [*system, ChatMessage(role="user", content=f"{state}\n\n{question.text}")]
            chat = await fields.encode_messages(service, asked, False, param="state")
            prompts.append(chat.token_ids)
            labels.append(_find_labels(service.require_tokenizer(), chat.token_ids, question.labels))
        request_id = new_id("decision-")
        outputs = await score_named(
            service,
            prompts,
            labels,
            request_id=request_id,
            param="questions",
            priority=body.priority,
            cache_salt=body.cache_salt,
            model=body.model,
        )
        answers = {
            question.name: question.answer(ids, output)
            for question, ids, output in zip(questions, labels, outputs, strict=True)
        }
        decided = DecisionResponse(
            id=request_id,
            created=int(time.time()),
            model=service.name_of(body.model),
            answers={name: answer for name, (answer, _) in answers.items()},
            usage=DecisionUsage(sum(map(len, prompts)), len(prompts)),
            diagnostics={name: diagnostics for name, (_, diagnostics) in answers.items()},
        )
        return Response(msgspec.json.encode(decided), headers=body.ignored_headers, media_type="application/json")

    return router
