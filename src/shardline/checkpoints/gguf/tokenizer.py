"""The tokenizer of a GGUF file, from its tokens, scores and merges, and its chat templates.

Three kinds are known: "gpt2" is byte-level BPE with merges, whose file names the rule by which text is split first
(`tokenizer.ggml.pre`), "llama" is SentencePiece's BPE, whose merges follow from the scores of the tokens, and "gemma4"
is the same with merges in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from shardline.checkpoints.gguf.header import GGUFHeader, end_token_ids, special_ids

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The letters that DeepSeek's first tokenizers join: ranges of those that have cases, as their files list them."""
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_UPPER_K2, _LOWER_K2 = (one[:-1] + r"&&[^\p{Han}]]" for one in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_K2}*{_LOWER_K2}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_K2}+{_LOWER_K2}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """How a byte-level tokenizer splits text before merges."""

    patterns: tuple[str, ...] = ()
    """Regular expressions, applied one after another; none: GPT-2's own."""
    digits_alone: bool = False
    ignores_merges: bool = False
    """Whether a piece that is a token becomes this token, whatever its merges are."""
    adds_bos: bool = False
    """What a file without add_bos_token means."""
    composes: bool = False
    """Whether text is normalized first (NFC)."""


SPLITS: dict[str, Split] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Split((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), Split((_QWEN2,), composes=True)),
    "qwen35": Split((_QWEN35,)),
    "tekken": Split((_TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Split(_DEEPSEEK3)),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    "kimi-k2": Split((_KIMI,)),
    "seed-coder": Split((_SEED,)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "granite-docling", "mellum"), Split()),
    **dict.fromkeys(("trillion", "gigachat", "a.x-4.0"), Split()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), Split(digits_alone=True)),
    "command-r": Split(digits_alone=True, composes=True),
}
"""By `tokenizer.ggml.pre`. A wrong split gives wrong tokens without a message, so others are refused."""


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Values of token_type."""
_KINDS = ("gpt2", "llama", "gemma4")
_SPACE = "\u2581"
_MAX_UNMADE = 0.1
"""Share of the tokens that no merge makes, in files that are whole."""
_HASH_BASE, _SLOT_BITS = 0x9E3779B97F4A7C15, 23
_OVERRIDE = "give the model's own tokenizer with --tokenizer"

_END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
)
"""Tokens that end an answer. Files of models that have several of them name only one or two."""


class GGUFVocabulary(NamedTuple):
    """What a GGUF file says about text."""

    tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    """bos_token, eos_token and others, for chat templates."""
    end_token_ids: tuple[int, ...]
    """Tokens that end an answer; the model's own end comes first."""


def has_vocabulary(header: GGUFHeader) -> bool:
    """Whether the file says anything about text."""
    return header.metadata.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def read_vocabulary(header: GGUFHeader) -> GGUFVocabulary:
    """The tokenizer in the metadata.

    Raises:
        ValueError: there is none, its kind or its way of splitting text is not known, or it is broken.
    """
    tokens = header.strings("tokenizer.ggml.tokens")
    kind = header.metadata.get("tokenizer.ggml.model")
    if not tokens or kind not in _KINDS:
        raise header.error(
            "tokenizer.ggml.model", f"is {kind!r}, which is not supported; supported: {', '.join(_KINDS)}; {_OVERRIDE}"
        )
    table = header.tensors.get("token_embd.weight")
    if table is not None and table.shape[0] != len(tokens):
        raise header.error(
            "tokenizer.ggml.tokens", f"has {len(tokens)} tokens, and the model {table.shape[0]} embeddings; {_OVERRIDE}"
        )
    types = _types(header, len(tokens))
    ids = special_ids(header)
    if kind == "llama":
        ids = {"bos_token": 1, "eos_token": 2, "unk_token": 0} | ids
    wrong = [name for name, number in ids.items() if number >= len(tokens)]
    if wrong:
        raise header.error(wrong[0], f"is {ids[wrong[0]]}, and there are {len(tokens)} tokens")
    if kind == "llama" and _is_gemma(header):
        # The file spells tokens of several spaces with spaces.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    build = _byte_level if kind == "gpt2" else _sentencepiece
    try:
        tokenizer = build(header, tokens, types, ids)
        added = [
            tokenizers.AddedToken(tokens[number], normalized=False, special=special)
            for number, special in _added(types, ids, tokens)
        ]
        tokenizer.add_special_tokens([token for token in added if token.special])
        tokenizer.add_tokens([token for token in added if not token.special])
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"the tokenizer in {header.file} is broken ({error}); {_OVERRIDE}") from error
    named = {name: tokens[number] for name, number in ids.items()}
    return GGUFVocabulary(tokenizer, named, _ends(header, tokens, types, ids))


def read_chat_templates(header: GGUFHeader) -> dict[str, str]:
    """The jinja sources of the chat templates by name; empty if the file has none."""
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(f"{prefix}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{prefix}.") and isinstance(value, str)
    }
    default = header.metadata.get(prefix)
    return found | ({"default": default} if isinstance(default, str) else {})


def _byte_level(
    header: GGUFHeader, tokens: list[str], types: Sequence[int], ids: dict[str, int]
) -> tokenizers.Tokenizer:
    pre = header.metadata.get("tokenizer.ggml.pre")
    if pre not in SPLITS:
        raise header.error(
            "tokenizer.ggml.pre", f"is {pre!r}: this way of splitting text is not known, and a guess would give wrong "
            f"tokens; {_OVERRIDE}"
        )  # fmt: skip
    split = SPLITS[pre]
    vocab = _vocab(tokens)
    merges = _stored_merges(header, vocab, types, all_needed=not split.ignores_merges)
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    if split.digits_alone:
        steps.append({"type": "Digits", "individual_digits": True})
    own_split = not split.patterns
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": own_split})
    parts = {
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(header, tokens, ids, adds_bos=split.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
    return _build(parts, vocab, merges, ignore_merges=split.ignores_merges)


def _sentencepiece(
    header: GGUFHeader, tokens: list[str], types: Sequence[int], ids: dict[str, int]
) -> tokenizers.Tokenizer:
    is_gemma4 = header.metadata["tokenizer.ggml.model"] == "gemma4"
    vocab = _vocab(tokens)
    merges = _stored_merges(header, vocab, types, all_needed=is_gemma4)
    if not merges and is_gemma4:
        raise header.error("tokenizer.ggml.merges", f"is missing; {_OVERRIDE}")
    if not merges:
        scores = header.numbers("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise header.error("tokenizer.ggml.scores", f"must have {len(tokens)} numbers; {_OVERRIDE}")
        # Gemma's scores do not follow the order of its merges; its ids do.
        ranks = np.arange(len(tokens)) if _is_gemma(header) else -scores.astype(np.float64)
        merges = _merges(tokens, ranks, types)
    prefixed = header.metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma4)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace] if prefixed else [replace]
    unknown = tokens[ids["unk_token"]] if "unk_token" in ids else None
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _post_processor(header, tokens, ids, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
    }
    return _build(parts, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _build(
    parts: dict[str, Any], vocab: dict[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    """The tokenizer of these parts; written as JSON, a large vocabulary would take twice the time."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", **parts, "model": empty}))
    tokenizer.model = tokenizers.models.BPE(vocab, merges, **options)
    return tokenizer


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    """The id of each token; of equal tokens the first one counts."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _stored_merges(
    header: GGUFHeader, vocab: dict[str, int], types: Sequence[int], *, all_needed: bool
) -> list[tuple[str, str]]:
    """The merges in the file; none: it has no list. `all_needed`: tokens that no merge makes do not occur.

    Raises:
        ValueError: they need tokens that are not there, or make too few of those that are.
    """
    key = "tokenizer.ggml.merges"
    merges = _pairs(header, header.strings(key))
    known, made = set(vocab), {left + right for left, right in merges}
    if not (known >= made and known.issuperset(chain.from_iterable(merges))):
        left, right = next(pair for pair in merges if not known >= {*pair, "".join(pair)})
        raise header.error(key, f"joins {left!r:.40} and {right!r:.40}, which needs unknown tokens; {_OVERRIDE}")
    if all_needed:
        words = [token for token, number in vocab.items() if types[number] == _NORMAL and len(token) > 1]
        num_made = sum(map(made.__contains__, words))
        if len(words) - num_made > _MAX_UNMADE * len(words):
            raise header.error(key, f"makes only {num_made} of {len(words)} tokens: it is cut; {_OVERRIDE}")
    return merges


def _merges(tokens: Sequence[str], ranks: NDArray[Any], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token of lowest rank first."""
    ids = {token: number for number, token in enumerate(tokens) if types[number] not in (_CONTROL, _UNKNOWN, _BYTE)}
    words = list(ids)
    pairs = [(words[index][:cut], words[index][cut:]) for index, cut in _possible_cuts(words)]
    pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
    if not pairs:
        return []
    found = np.array([(ids[left + right], ids[left], ids[right]) for left, right in pairs])
    made, left_ids, right_ids = found.T
    return [pairs[index] for index in np.lexsort((right_ids, left_ids, made, ranks[made])).tolist()]


def _possible_cuts(words: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(index of a word, where to cut it) of the cuts whose halves may be words: few others have hashes of words.

    A vocabulary of 262,144 has three million cuts, too many for a loop at each start.
    """
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    sizes = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    ends = np.cumsum(sizes)
    begins = ends - sizes
    # The hash of a text is the sum of code x base^position, modulo 2^64, where the base has an inverse.
    one = np.ones(1, np.uint64)
    powers, inverse = (
        np.concatenate([one, np.cumprod(np.full(len(codes), base, np.uint64))])
        for base in (_HASH_BASE, pow(_HASH_BASE, -1, 1 << 64))
    )
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers[:-1])])

    def find_slots(start: NDArray[Any], end: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = (sums[end] - sums[start]) * inverse[start] * np.uint64(_HASH_BASE)
        slots: NDArray[Any] = found >> np.uint64(64 - _SLOT_BITS)
        return slots

    is_word = np.zeros(1 << _SLOT_BITS, dtype=np.bool_)
    is_word[find_slots(begins, ends)] = True
    cuts = np.delete(np.arange(len(codes)), begins[sizes > 0])
    owners = np.searchsorted(ends, cuts, side="right")
    chosen = is_word[find_slots(begins[owners], cuts)]
    owners, cuts = owners[chosen], cuts[chosen]
    chosen = is_word[find_slots(cuts, ends[owners])]
    owners, cuts = owners[chosen], cuts[chosen]
    return zip(owners.tolist(), (cuts - begins[owners]).tolist(), strict=True)


def _post_processor(
    header: GGUFHeader, tokens: Sequence[str], ids: dict[str, int], adds_bos: bool
) -> dict[str, Any] | None:
    """Puts the token of the beginning before a text, and that of the end behind it, if the file says so."""
    # The first files of Gemma 4 said that there is none, and the model needs it.
    adds_bos = header.metadata["tokenizer.ggml.model"] == "gemma4" or header.metadata.get(
        "tokenizer.ggml.add_bos_token", adds_bos
    )
    first = adds_bos and "bos_token" in ids
    last = header.metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in ids
    if not first and not last:
        return None
    bos, eos = (tokens[ids[name]] if name in ids else "" for name in ("bos_token", "eos_token"))

    def around(part: str) -> Iterator[dict[str, Any]]:
        if first:
            yield {"SpecialToken": {"id": bos, "type_id": 0}}
        yield {"Sequence": {"id": part, "type_id": 0}}
        if last:
            yield {"SpecialToken": {"id": eos, "type_id": 0}}

    used = [name for name, is_used in (("bos_token", first), ("eos_token", last)) if is_used]
    return {
        "type": "TemplateProcessing",
        "single": list(around("A")),
        "pair": [*around("A"), *around("B")],
        "special_tokens": {
            tokens[ids[name]]: {"id": tokens[ids[name]], "ids": [ids[name]], "tokens": [tokens[ids[name]]]}
            for name in used
        },
    }


def _added(types: Sequence[int], ids: dict[str, int], tokens: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """(id, whether it is special) of tokens that are found in a text before it is split."""
    special = {ids[name] for name in ("bos_token", "eos_token") if name in ids}
    found = {number for number, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    for number in sorted(found | special):
        # In normalized text, runs of spaces are found by merges: an added token would cut a run in two.
        if not tokens[number].strip(_SPACE):
            continue
        yield number, types[number] == _CONTROL or number in special


def _ends(header: GGUFHeader, tokens: Sequence[str], types: Sequence[int], ids: dict[str, int]) -> tuple[int, ...]:
    named = end_token_ids(header) or ((ids["eos_token"],) if "eos_token" in ids else ())
    known = {token: number for number, token in enumerate(tokens) if types[number] in (_CONTROL, _USER_DEFINED)}
    texts = [text for text in _END_TEXTS if text in known]
    if "<|return|>" in texts and "<|end|>" in texts:
        texts.remove("<|end|>")  # in these models it ends a message of several
    return tuple(dict.fromkeys((*(number for number in named if number < len(tokens)), *(known[t] for t in texts))))


def _types(header: GGUFHeader, count: int) -> list[int]:
    types = header.numbers("tokenizer.ggml.token_type")
    if types is None:
        return [1] * count
    if len(types) != count:
        raise header.error("tokenizer.ggml.token_type", f"has {len(types)} numbers for {count} tokens")
    kinds: list[int] = types.tolist()
    return kinds


def _pairs(header: GGUFHeader, merges: list[str]) -> list[tuple[str, str]]:
    """The halves of each merge. A space at its beginning belongs to the first half."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges) if left and right]
    if len(pairs) == len(merges):
        return pairs
    pairs = []
    for merge in merges:
        left, space, right = merge[1:].partition(" ")
        if not space:
            raise header.error("tokenizer.ggml.merges", f"has an entry without a space: {merge!r:.40}; {_OVERRIDE}")
        pairs.append((merge[:1] + left, right))
    return pairs


def _is_gemma(header: GGUFHeader) -> bool:
    return str(header.metadata.get("general.architecture")).startswith("gemma")
