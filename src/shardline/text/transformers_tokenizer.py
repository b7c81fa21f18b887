"""The model's tokenizer with the names of Hugging Face's tokenizers, for code that was written for those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from shardline.text.chat_messages import Message
from shardline.text.chat_template import ChatTemplate, Conversation, render_and_encode
from shardline.text.model_files import SPECIAL_NAMES
from shardline.text.tokenizer import Tokenizer

Texts = str | Sequence[str]


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, as items and as attributes: of one text, or lists of those of several."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class TransformersTokenizer:
    """What `LLM.get_tokenizer()` returns. It behaves as the tokenizer that transformers loads, but makes lists of ids
    only, no tensors: code of models runs nowhere here, and this storey knows no torch."""

    is_fast = True
    padding_side = "right"
    truncation_side = "right"

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, model_max_length: int) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self.model_max_length = model_max_length

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return self._tokenizer.vocab_size

    def __call__(
        self,
        text: Texts,
        *,
        add_special_tokens: bool = True,
        padding: bool | Literal["longest", "max_length"] = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: None = None,
    ) -> Encoded:
        """The ids of one text or of several.

        Raises:
            ValueError: it is no text, tensors are asked for, or padding although the model has no token for it.
        """
        if return_tensors is not None:
            raise ValueError("return_tensors is not supported: make tensors of the lists in input_ids")
        texts = [text] if isinstance(text, str) or not isinstance(text, Iterable) else list(text)
        limit = max_length or self.model_max_length
        ids = self._tokenizer.encode_texts(texts, add_special_tokens)
        if truncation:
            ids = [one[:limit] for one in ids]
        masks = [[1] * len(one) for one in ids]
        if padding:
            width = limit if padding == "max_length" else max(map(len, ids), default=0)
            if self.pad_token_id is None:
                raise ValueError("padding needs a pad token, and this tokenizer has none")
            masks = [mask + [0] * (width - len(mask)) for mask in masks]
            ids = [one + [self.pad_token_id] * (width - len(one)) for one in ids]
        if isinstance(text, str):
            return Encoded(input_ids=ids[0], attention_mask=masks[0])
        return Encoded(input_ids=ids, attention_mask=masks)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return self._tokenizer.encode_text(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids. Unlike that of `Tokenizer`, it has the special tokens, as in transformers."""
        return self._tokenizer.decode(_as_list(token_ids), skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """The texts of several lists of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text, as the vocabulary spells them."""
        return self._spell_all(self._tokenizer.encode_text(text, add_special_tokens))

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str | list[str]:
        """How the vocabulary spells one id, or several."""
        if isinstance(ids, int):
            return self._spell_all([ids])[0]
        hidden = self._tokenizer.special_token_ids if skip_special_tokens else frozenset()
        return self._spell_all([token_id for token_id in _as_list(ids) if token_id not in hidden])

    def convert_tokens_to_ids(self, tokens: Texts) -> int | list[int | None] | None:
        """The id of one token, or of several; that of the unknown token where the vocabulary lacks one."""
        if isinstance(tokens, str):
            token_id = self._tokenizer.token_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [cast("int | None", self.convert_tokens_to_ids(token)) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        ids = [token_id for token in tokens if (token_id := self._tokenizer.token_id(token)) is not None]
        return self.decode(ids)

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, and their ids."""
        return self._tokenizer.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """The added tokens and their ids."""
        return self._tokenizer.get_added_vocab()

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many special tokens `encode` adds to a text."""
        return len(self._tokenizer.encode_text(""))

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation, or of several: its text, its ids or (`return_dict`) an `Encoded`.

        A special token that a message spells becomes that token, as in transformers.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        template = self._template
        if chat_template is not None:
            template = ChatTemplate(chat_template, self._tokenizer.special_tokens)
        if template is None:
            raise ValueError("the model has no chat template; give one as chat_template")
        is_single = not conversation or isinstance(conversation[0], Mapping)
        chats = cast("Sequence[Sequence[Message]]", [conversation] if is_single else conversation)
        try:
            prompts = [
                render_and_encode(
                    template,
                    self._tokenizer,
                    Conversation(chat, tools, variables, add_generation_prompt, continue_final_message),
                    special_tokens_in_content=True,
                )
                for chat in chats
            ]
        finally:
            if chat_template is not None:
                template.close()
        if not tokenize:
            texts = [text for text, _ in prompts]
            return texts[0] if is_single else texts
        ids = [ids for _, ids in prompts]
        masks = [[1] * len(one) for one in ids]
        if not return_dict:
            return ids[0] if is_single else ids
        if is_single:
            return Encoded(input_ids=ids[0], attention_mask=masks[0])
        return Encoded(input_ids=ids, attention_mask=masks)

    @property
    def chat_template(self) -> str | None:
        """The source of the template of plain chats."""
        return None if self._template is None else self._template.sources.get("default")

    @property
    def vocab_size(self) -> int:
        """Number of tokens without the added ones; `len` has those too."""
        return len(self) - len(self.get_added_vocab())

    @property
    def max_token_id(self) -> int:
        """The largest id."""
        return max(self.get_vocab().values(), default=-1)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The named special tokens, for example "bos_token", and their texts."""
        return dict(self._tokenizer.special_tokens)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return sorted(self._tokenizer.special_token_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens."""
        return self._spell_all(self.all_special_ids)

    def __getattr__(self, name: str) -> Any:
        """`bos_token`, `eos_token_id` and so on; None: the tokenizer names no such token."""
        kind = name.removesuffix("_id")
        if kind not in SPECIAL_NAMES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        token = self._tokenizer.special_tokens.get(kind)
        return self._tokenizer.token_id(token) if name.endswith("_id") else token

    def _spell_all(self, ids: Iterable[int]) -> list[str]:
        return [self._tokenizer.token(token_id) or "" for token_id in ids]


def _as_list(ids: int | Iterable[int]) -> list[int]:
    return [ids] if isinstance(ids, int) else [int(token_id) for token_id in ids]
