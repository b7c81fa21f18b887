"""Small tokenizers for tests, of the two kinds that models have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from shardline.text.chat_template import ChatTemplate, Conversation
from shardline.text.tokenizer import Tokenizer

SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
CORPUS = [
    "What does os.path.join do? It joins one or more path segments intelligently.",
    "The quick brown fox jumps over the lazy dog; the dog does not mind, it is late.",
    "Grüße aus Köln: 你好世界 🙂🙃 naïve café, déjà vu, Привет, мир! 日本語のテキスト",
] * 3
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def byte_level_json() -> str:
    """A byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


@cache
def metaspace_json() -> str:
    """A BPE in the style of sentencepiece, with Metaspace: the first space is dropped."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


@cache
def byte_fallback_json() -> str:
    """A tokenizer like Llama 2's: a normalizer marks spaces, and unknown characters become byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for char in "▁abcdefghijklmnopqrstuvwxyz.":
        vocab[char] = len(vocab)
    merges = []
    for pair in (("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "a"), ("▁", "▁")):
        vocab["".join(pair)] = len(vocab)
        merges.append(pair)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend.to_str()


@cache
def gemma_json() -> str:
    """A tokenizer like Gemma's: as Llama 2's, but no space is put before a text."""
    value = json.loads(byte_fallback_json())
    value["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    value["decoder"]["decoders"].pop()
    return json.dumps(value)


def tokenizer(source: str) -> Tokenizer:
    """A Tokenizer from one of the sources above."""
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Tokenizer(tokenizers.Tokenizer.from_str(source), special_tokens=names)


def save_folder(folder: Path, source: str, **config: object) -> Path:
    """Write tokenizer files into a model's folder; `config` goes to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(source, encoding="utf-8")
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def render(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt text of a conversation, with arguments as in transformers."""
    return template.render(Conversation(messages, tools, variables, add_generation_prompt))
