"""The axes of the exactness matrix, its full product, and a pairwise sample of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.exactness.stored import SAMPLED_STORED, STORED
from tests.models.checkpoints import FAMILIES, LIKE_OTHERS, OWN_PARTS, has_experts
from tests.models.heads import PREDICTING
from tests.weights.forms import FORMS

WHOLE_EXPERTS = "whole-experts"
INT8_KV, FP8_KV = "kv-int8", "kv-fp8"
PACKED = "packed"
NO_DRAFTS, DRAFTS, SUFFIX_DRAFTS = "no-drafts", "drafts", "suffix-drafts"
MODEL_DRAFTS, HEAD_DRAFTS, EAGLE3_DRAFTS = "model-drafts", "head-drafts", "eagle3-drafts"
MTP_DRAFTS = "mtp-drafts"
OF_HEADS = (HEAD_DRAFTS, EAGLE3_DRAFTS, MTP_DRAFTS)
NO_MARK, KGW, SYNTHID = "no-mark", "kgw", "synthid"
NO_ADAPTERS, ADAPTERS = "", "adapters"

_WINDOWED = ("gemma2", "gemma3_text", "gpt_oss", "llama4_text", "olmo3", "cohere2", "exaone4", "gemma4_text")
"""Families with windows in some layers."""
_SHORT_ANSWERS = ("mimo_v2_flash",)
"""Families whose random answers are too short to preempt each other if their requests do not come together."""
_ALL_WINDOWED = ("mistral",)
"""Families with windows in all layers, whose block tables no draft model can use."""
SAMPLED_FAMILIES = tuple(family for family in FAMILIES if family not in (*OWN_PARTS, *LIKE_OTHERS))
"""Families of the pairwise sample."""


class Case(NamedTuple):
    """One way of computing the same requests."""

    family: str
    dtype: str
    tensor: int
    pipeline: int
    data: int
    batch: str
    """alone: one request after another; together: all at once; staggered: joining and leaving while others run."""
    prefill: str
    """whole: a prompt in one step; chunked: in pieces that follow from what else is in the step."""
    cache: str
    """off; cold: the first time; warm: the second time, prefixes are in the cache."""
    memory: str
    """roomy; tight: so few KV blocks that sequences are preempted."""
    quantization: str
    """As in SCHEMES, or the name of a checkpoint's format in STORED."""
    experts: str
    """split-experts: a part of every one on each rank; whole-experts: some on each, where the family has any."""
    kv: str
    """Type of the KV cache."""
    hosts: str
    """Where the ranks are: one-host; two-hosts, each with half of them in order; in-turns on two hosts. Ranks of two
    hosts exchange tensors over sockets."""
    drafts: str = NO_DRAFTS
    """drafts: most guesses of the next tokens are right, some are wrong, and come in place of what a search of the
    text finds; suffix-drafts: of a search of earlier answers, too; model-drafts, head-drafts, eagle3-drafts,
    mtp-drafts: they come where a draft model, an EAGLE head, of the first or third version, or the head in the model's
    checkpoint has made its own."""
    mark: str = NO_MARK
    """kgw, synthid: most requests are marked, by this scheme."""
    adapters: str = NO_ADAPTERS
    """adapters: each batch has requests with either of two adapters, and without one."""
    context: int = 1

    @property
    def name(self) -> str:
        """For test ids."""
        layout = f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}" + (f"-cp{self.context}" if self.context > 1 else "")
        return "-".join(filter(None, (self.family, self.dtype, layout, *self[5:-1])))

    @property
    def possible(self) -> bool:
        """Preemption needs several sequences at once, and all of them with drafts, which end them sooner; whole experts
        need a model with experts, and their adapters serve one replica; in a tight pool, windowed groups that grow
        together, or sequences of several adapters, leave nothing of the first time in the prefix cache, and with both
        and drafts, it depends on the answers whether the pool is too small; the rest combines freely."""
        adapters, windowed = self.adapters == ADAPTERS, self.family in _WINDOWED
        if adapters and self.data > 1 and self.experts == WHOLE_EXPERTS:
            return False
        forgotten = self.cache == "warm" and (adapters or (windowed and self.batch == "together"))
        too_few = self.drafts != NO_DRAFTS and (self.batch != "together" or (adapters and windowed))
        if self.memory == "tight" and (forgotten or too_few):
            return False
        return all(_meet(a, b) for a, b in itertools.combinations(self, 2))


def _meet(a: Any, b: Any) -> bool:
    """Whether two values, in the order of the axes, can be in one case."""
    if b == WHOLE_EXPERTS and a in FAMILIES:
        return has_experts(a)
    if b == MTP_DRAFTS and (a in FAMILIES or a == WHOLE_EXPERTS):
        return a in PREDICTING
    if b in (MODEL_DRAFTS, *OF_HEADS) and a in FAMILIES:
        return a not in _ALL_WINDOWED
    return (a, b) != ("alone", "tight")


SCHEMES = ("none", "int8", "int4_fast", "fp8", PACKED)
"""Formats of weights. In a packed checkpoint, the forms of tests/weights/forms.py are mixed. packed-awq has one of
them, and awq, in STORED, is a checkpoint in that format."""

CONTEXT_FAMILIES = ("llama", "gpt_oss", "qwen3_moe", "gemma2", "llama4_text", "gemma4_text", "olmo2", "deepseek_v3")
"""Families of long requests: plain, with windows, sinks and caps, with chunks, with experts, with norms over all heads,
and with latents."""

KV_TYPES = ("kv-auto", INT8_KV, FP8_KV)
"""Types of the KV cache. Samples do without fp8, which has the code of int8: `latent_layouts` and
`layouts_of_own_parts` have it."""


def axes(families: Sequence[str], schemes: Sequence[str], kv_types: Sequence[str]) -> list[Sequence[Any]]:
    """The values of each field of Case."""
    return [
        tuple(families),
        ("float32", "bfloat16"),
        (1, 2, 3, 4),
        (1, 2, 3),
        (1, 2),
        ("alone", "together", "staggered"),
        ("whole", "chunked"),
        ("off", "cold", "warm"),
        ("roomy", "tight"),
        tuple(schemes),
        ("split-experts", WHOLE_EXPERTS),
        tuple(kv_types),
        ("one-host", "two-hosts", "in-turns"),
        (NO_DRAFTS, DRAFTS, SUFFIX_DRAFTS, MODEL_DRAFTS, *OF_HEADS),
        (NO_MARK, KGW, SYNTHID),
        (NO_ADAPTERS, ADAPTERS),
    ]


def full_matrix(keyword: str) -> list[Case]:
    """Pairwise samples of every form and format of packed checkpoints, and the full product of all else.

    `keyword` is pytest's -k. Words that are joined by "and" leave out other cases before pytest sees the millions of
    them, and the product where a sample has all the words.
    """
    words = keyword.split(" and ") if keyword else []
    samples = [case for form in FORMS for case in pairwise_sample(SAMPLED_FAMILIES, (f"{PACKED}-{form}",))]
    for name, stored in STORED.items():
        samples += map(_surely_preempting, pairwise_sample((stored.family,), (name,)))
    chosen = [case for case in samples if all(word in case.name for word in words)]
    return chosen if chosen and words else chosen + full_product(FAMILIES, words)


def _surely_preempting(case: Case) -> Case:
    """The case with all requests at once if memory is tight: random codes may make answers too short otherwise."""
    together = case._replace(batch="together")
    if case.memory != "tight" or case.batch == "together":
        return case
    return together if together.possible else case._replace(memory="roomy")


def full_product(families: Sequence[str], words: Sequence[str] = ()) -> list[Case]:
    """Every possible case whose name has all the words."""
    values = axes(families, SCHEMES, KV_TYPES)
    for word in words:
        values = [[value for value in axis if word in str(value)] or axis for axis in values]
    cases = itertools.starmap(Case, itertools.product(*values))
    return [case for case in cases if case.possible and all(word in case.name for word in words)]


def latent_layouts() -> list[Case]:
    """Latent attention in every layout: ranks share one cache there, which a sample of layouts might not catch."""
    rest = ("staggered", "chunked", "warm", "tight", "none", WHOLE_EXPERTS)
    layouts = itertools.product((1, 2, 3, 4), (1, 2))
    kv_types = ("kv-auto", FP8_KV, "kv-auto", "kv-auto", FP8_KV, "kv-auto", "kv-auto", "kv-auto")
    return [
        Case("deepseek_v3", "bfloat16", tp, pp, 1, *rest, kv, "one-host")
        for (tp, pp), kv in zip(layouts, kv_types, strict=True)
    ]


def layouts_of_own_parts() -> list[Case]:
    """A layout of each family in OWN_PARTS: more ranks than KV heads, and two stages."""
    rest = ("staggered", "chunked", "cold", "tight")
    cases = []
    for index, family in enumerate(OWN_PARTS):
        kv = "kv-auto" if index % 2 else (INT8_KV, FP8_KV)[index % 4 // 2]
        experts = WHOLE_EXPERTS if has_experts(family) and index % 3 == 0 else "split-experts"
        quantization = ("none", "none", "int8", "int4_fast")[index % 4]
        case = Case(family, "bfloat16", 3, 2, 1, *rest, quantization, experts, kv, "one-host")
        cases.append(_surely_preempting(case) if family in _SHORT_ANSWERS else case)
    return cases


def layouts_with_heads() -> list[Case]:
    """Layouts of heads, beside parts of models that they could disturb. Samples do without these values: their
    way is that of a draft model, but for the hidden states."""
    whole = ("whole", "cold", "roomy")
    return [
        Case("llama", "bfloat16", 3, 1, 2, "together", "chunked", "warm", "tight", "none", *_HEAD_REST[0]),
        Case("gemma2", "bfloat16", 1, 3, 2, "together", "chunked", "off", "tight", "fp8", *_HEAD_REST[1]),
        Case("deepseek_v3", "float32", 2, 2, 1, "staggered", *whole, "fp8", *_HEAD_REST[2]),
        Case("deepseek_v2", "bfloat16", 1, 1, 2, "staggered", *whole, PACKED, *_HEAD_REST[3]),
        Case("mixtral", "bfloat16", 4, 1, 1, "together", "chunked", "off", "roomy", "int4_fast", *_HEAD_REST[4]),
        Case("gpt2", "bfloat16", 4, 1, 1, "together", *whole, "none", *_HEAD_REST[5]),
        # It reads what goes into a layer that stores no keys.
        Case("gemma4_text", "bfloat16", 2, 1, 1, "together", *whole, "none", *_HEAD_REST[1]),
        Case("deepseek_v3", "bfloat16", 1, 2, 1, "staggered", "chunked", "warm", "roomy", "int8", *_HEAD_REST[6]),
        Case("glm4_moe", "float32", 3, 1, 1, "together", "chunked", "off", "tight", "none", *_HEAD_REST[7]),
    ]


_HEAD_REST = (
    ("split-experts", INT8_KV, "in-turns", HEAD_DRAFTS, NO_MARK),
    ("split-experts", INT8_KV, "two-hosts", EAGLE3_DRAFTS, KGW),
    ("split-experts", "kv-auto", "in-turns", HEAD_DRAFTS, KGW),
    (WHOLE_EXPERTS, "kv-auto", "one-host", HEAD_DRAFTS, NO_MARK),
    (WHOLE_EXPERTS, INT8_KV, "in-turns", EAGLE3_DRAFTS, KGW),
    ("split-experts", INT8_KV, "in-turns", EAGLE3_DRAFTS, NO_MARK, ADAPTERS),
    ("split-experts", "kv-auto", "two-hosts", MTP_DRAFTS, NO_MARK, ADAPTERS),
    ("split-experts", INT8_KV, "one-host", MTP_DRAFTS, SYNTHID),
)


def layouts_of_formats() -> list[Case]:
    """A layout of the checkpoints in some formats."""
    cases = []
    for index, name in enumerate(SAMPLED_STORED):
        family = STORED[name].family
        experts = WHOLE_EXPERTS if has_experts(family) and index % 2 else "split-experts"
        rest = ("staggered", "chunked", "cold", "tight", name, experts, ("kv-auto", INT8_KV)[index % 2], "one-host")
        cases.append(Case(family, "bfloat16", 3, 1 + index % 2, 1, *rest))
    return cases


def context_layouts(*, full: bool) -> list[Case]:
    """Layouts in which ranks share the keys of long requests, with what else could disturb them; `full`: all layouts
    with each of these, and those of one rank too, which must not differ either."""
    rests = [
        ("staggered", "chunked", "warm", "roomy", "none", "split-experts", "kv-auto", "one-host", DRAFTS, KGW),
        ("together", "chunked", "off", "tight", "int8", "split-experts", "kv-auto", "two-hosts", NO_DRAFTS, NO_MARK),
        ("together", "whole", "cold", "roomy", "none", "split-experts", INT8_KV, "in-turns", NO_DRAFTS, NO_MARK),
        ("staggered", "whole", "warm", "roomy", "none", WHOLE_EXPERTS, FP8_KV, "one-host", NO_DRAFTS, NO_MARK),
        ("together", "chunked", "warm", "roomy", "none", "split-experts", INT8_KV, "one-host", MODEL_DRAFTS, NO_MARK),
    ]
    if full:
        sizes = list(itertools.product(("float32", "bfloat16"), (1, 2), (1, 2), (1, 2), rests, (1, 2, 3)))
        cases = [
            Case(family, dtype, tensor, pipeline, data, *rest, context=context)
            for family in CONTEXT_FAMILIES
            for dtype, tensor, pipeline, data, rest, context in sizes
            # Where memory is tight, one rank has room for all of them, and only one replica has a long request.
            if rest[3] == "roomy" or (context > 1 and data == 1)
        ]
        return [case for case in cases if case.possible]
    return [
        Case("llama", "bfloat16", 1, 1, 1, *rests[0], context=2),
        Case("llama", "float32", 1, 2, 1, *rests[1], context=3),
        Case("gpt_oss", "bfloat16", 2, 1, 1, *rests[2], context=2),
        Case("qwen3_moe", "bfloat16", 1, 1, 2, *rests[3], context=2),
        Case("deepseek_v3", "bfloat16", 1, 1, 1, *rests[3], context=2),
        Case("olmo2", "bfloat16", 1, 1, 1, *rests[4], context=3),
    ]


def _effort(case: Case) -> float:
    """About how long a case takes, with its golden answers, in seconds."""
    seconds = 0.25 + 0.05 * case.tensor * case.pipeline * case.data
    for is_so, factor in ((case.cache == "warm", 1.5), (case.batch == "alone", 1.3), (case.memory == "tight", 1.2)):
        seconds *= factor if is_so else 1.0
    return seconds + 0.15


_CANDIDATES, _COMPARED = 3000, 100
"""Cases that are drawn for each case of a sample, and how many of these are compared: those with the most new pairs."""
_THRIFT = 0.7
"""How much the effort of a case counts against its new pairs."""


def pairwise_sample(families: Sequence[str], schemes: Sequence[str], *, quick: bool = False) -> list[Case]:
    """Cases in which every two values of different axes meet at least once (greedy covering array).

    `quick`: those that take little time are preferred.
    """
    values = [[value for value in axis if value not in OF_HEADS] for axis in axes(families, schemes, KV_TYPES[:2])]
    if not any(has_experts(family) for family in families):
        values = [[value for value in axis if value != WHOLE_EXPERTS] for axis in values]
    flat = [(axis, value) for axis, known in enumerate(values) for value in known]
    sizes = np.array([len(known) for known in values])
    first = np.cumsum(sizes) - sizes
    allowed = np.array([[i < j and _meet(a, b) for j, b in flat] for i, a in flat])
    missing = allowed.copy()
    earlier, later = np.triu_indices(len(values), 1)
    rng = np.random.RandomState(8)
    cases: list[Case] = []
    num_vain = 0
    while missing.any():
        drawn = first + (rng.random_sample((_CANDIDATES, len(values))) * sizes).astype(int)
        pair = np.unravel_index(missing.argmax(), missing.shape)
        for number in pair:
            drawn[:, flat[number][0]] = number
        drawn = drawn[allowed[drawn[:, earlier], drawn[:, later]].all(1)]
        found = missing[drawn[:, earlier], drawn[:, later]].sum(1)
        candidates = []
        for index in np.argsort(-found, kind="stable")[:_COMPARED]:
            case = Case(*(flat[number][1] for number in drawn[index]))
            if case.possible:
                candidates.append((found[index] / _effort(case) ** _THRIFT if quick else found[index], index, case))
        num_vain = 0 if candidates else num_vain + 1
        assert num_vain < 100, f"no case has both of {[flat[number] for number in pair]}"
        if candidates:
            _, index, case = max(candidates)
            missing[np.ix_(drawn[index], drawn[index])] = False
            cases.append(case)
    return cases
