"""Whether two models have the same tokens under the same ids, by the contents of their tokenizers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shardline.checkpoints.folder_files import MAX_TOKENIZER_BYTES, read_bytes
from shardline.checkpoints.gguf.header import read_header
from shardline.checkpoints.gguf.names import is_gguf

_MOST_PADDING = 0.05
"""Share of a vocabulary that may only pad it: sizes are rounded up, and no text has these ids."""


def check_same_vocabulary(model: tuple[str, int], draft: tuple[str, int]) -> None:
    """Refuse a draft model with another vocabulary. Each is (its tokenizer's file, or "" if it has none; vocab_size).

    Raises:
        ValueError: the first id that differs, or the sizes if one has no tokenizer.
    """
    (file, size), (own_file, own_size) = model, draft
    if not file or not own_file:
        if size != own_size:
            raise ValueError(f"its vocabulary has {own_size} tokens, and that of the model {size}; they must be equal")
        return
    tokens, own_tokens = _tokens(Path(file)), _tokens(Path(own_file))
    for token_id in range(min(size, own_size)):
        text, own_text = tokens.get(token_id), own_tokens.get(token_id)
        if text != own_text:
            raise ValueError(
                f"its vocabulary is another one: token {token_id} is {_said(own_text)}, and {_said(text)} in that of "
                "the model; a draft model needs the model's tokenizer"
            )
    if abs(size - own_size) > _MOST_PADDING * size:
        raise ValueError(f"its vocabulary has {own_size} tokens, and that of the model {size}; only padding may differ")


def _tokens(file: Path) -> dict[int, str]:
    """The texts of tokens by id.

    Raises:
        ValueError: the file is broken.
    """
    if is_gguf(file):
        return dict(enumerate(read_header(file).strings("tokenizer.ggml.tokens")))
    try:
        content = msgspec.json.decode(read_bytes(file, MAX_TOKENIZER_BYTES), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} has no vocabulary: {error}") from None
    vocab = content.model.vocab
    known = (
        {token_id: text for text, token_id in vocab.items()}
        if isinstance(vocab, dict)
        else {token_id: text for token_id, (text, _) in enumerate(vocab)}
    )
    return known | {token.id: token.content for token in content.added_tokens}


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    """What is read of a tokenizer.json."""

    model: _Vocabulary
    added_tokens: list[_Added] = []


def _said(text: str | None) -> str:
    return "missing" if text is None else repr(text)
