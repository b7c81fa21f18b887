"""A model as data: typed parts, layer by layer. Nothing here knows ranks, torch or file formats.

From a DecoderSpec the runtime builds its modules, the scheduler gets its KV groups, and `models.sizes` computes bytes
and FLOPs. A spec is sent to engines and workers as msgpack, so its parts are msgspec structs. They are sent without
field names, since there is a part for every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from shardline.models.attention import GQA, Attention
from shardline.models.feed_forward import FeedForward
from shardline.models.linear_attention import LinearAttention
from shardline.models.mamba import Mamba2
from shardline.models.mla import MLA
from shardline.models.partition import Span, split_dim
from shardline.models.parts import Activation, DType, Norm, Parameters, Part, linear_parameters, norm_parameters

if TYPE_CHECKING:
    AnyAttention = Attention
else:  # what engines send each other; the kinds that only the planner knows never leave it
    AnyAttention = GQA | MLA | LinearAttention | Mamba2


class TokenInput(Part, frozen=True, array_like=True):
    """What a layer reads of the token itself: x += norm(down(act(gate(x)) * input)) after its blocks (Gemma 4).

    input = (norm(projection(e) / sqrt(hidden_size)) + sqrt(size) * row) / sqrt(2). Here e is the token's embedding, and
    row is the token's row of a table that the layer has of its own.
    """

    size: int
    """Elements of `input`."""
    vocab_size: int
    """Rows of the table."""
    activation: Activation
    norm: Norm
    """The kind of both norms."""

    def parameters(self, hidden_size: int) -> Parameters:
        """The parameters, see `models.parameters`."""
        yield "token_input.embed.weight", (self.vocab_size, self.size)
        yield from linear_parameters("token_input.projection", self.size, hidden_size)
        yield from linear_parameters("token_input.gate", self.size, hidden_size)
        yield from linear_parameters("token_input.down", hidden_size, self.size)
        yield from norm_parameters("token_input.norm", self.norm, hidden_size)

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """See `Attention.gathered`."""
        return self.size + hidden_size, 2

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`. The table is split by its columns, and the projection's norm needs whole rows."""
        if part == "token_input.projection":
            return None
        if part not in ("token_input.embed", "token_input.gate", "token_input.down"):
            raise KeyError(part)
        return split_dim(self.size, ranks)[rank]


class Layer(Part, frozen=True, array_like=True, cache_hash=True):
    """One decoder layer: x += post(attention(pre(x))), then x += post(feed_forward(pre(x))).

    A norm that is None is left out.
    """

    words: ClassVar[Mapping[str, str]] = {
        "residual_scale": "scale of the residual stream",
        "output_scale": "scale of the residual stream",
        "token_input": "layers with inputs of their own for each token",
    }

    attention: AnyAttention
    feed_forward: FeedForward
    """A Dense of size 0 stands for none: a layer of Nemotron-H may be attention alone."""
    attention_norm: Norm | None
    feed_forward_norm: Norm | None
    post_attention_norm: Norm | None = None
    post_feed_forward_norm: Norm | None = None
    parallel: bool = False
    """Whether attention_norm feeds both blocks: x += attention(pre(x)) + feed_forward(pre(x)) (Cohere)."""
    residual_scale: float = 1.0
    """Factor of each block's output before it is added (Granite)."""
    output_scale: bool = False
    """Whether the residual stream is multiplied by a learned number after the layer (Gemma 4)."""
    token_input: TokenInput | None = None

    @property
    def residual_streams(self) -> int:
        """Number of residual streams."""
        return 1

    @property
    def num_launches(self) -> int:
        """Kernels in a usual implementation. Those that run beside others do not count."""
        return self.attention.num_launches + self.feed_forward.num_launches

    def activation_elements(self, hidden_size: int, ranks: int) -> float:
        """Elements of a token's activations that kernels read and write on one of `ranks`."""
        routing = self.feed_forward.routing
        chosen = 0 if routing is None else routing.experts_per_token
        inner = 6 * self.attention.output_size / ranks
        inner += 6 * max(1, chosen) * self.feed_forward.block.intermediate_size / ranks
        return (8 + 2 * chosen) * hidden_size + inner

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """See `Attention.gathered`."""
        each = [block.gathered(hidden_size) for block in self._blocks.values()]
        return sum(elements for elements, _ in each), sum(gathers for _, gathers in each)

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Attention.split`."""
        return self._blocks[part.partition(".")[0]].split(part, rank, ranks)

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> Parameters:
        """(name without `layers.{i}.`, full shape) of the parameters, with the first `num_experts` experts only."""
        yield from norm_parameters("attention_norm", self.attention_norm, hidden_size)
        yield from self.attention.parameters(hidden_size)
        yield from norm_parameters("post_attention_norm", self.post_attention_norm, hidden_size)
        yield from norm_parameters("feed_forward_norm", self.feed_forward_norm, hidden_size)
        yield from self.feed_forward.parameters(hidden_size, num_experts)
        yield from norm_parameters("post_feed_forward_norm", self.post_feed_forward_norm, hidden_size)
        if self.token_input is not None:
            yield from self.token_input.parameters(hidden_size)
        if self.output_scale:
            yield "output_scale.bias", (1,)

    def norm_of(self, part: str) -> Norm | None:
        """See `Part.norm_of`."""
        if (block := self._blocks.get(part.partition(".")[0])) is not None:
            return block.norm_of(part)
        norm: Norm | None = getattr(self, part)
        return norm

    @property
    def _blocks(self) -> Mapping[str, Attention | FeedForward | TokenInput]:
        """What the layer computes, by the first word of its parameters' names."""
        blocks: dict[str, Attention | FeedForward | TokenInput]
        blocks = {"attention": self.attention, "feed_forward": self.feed_forward}
        return blocks if self.token_input is None else {**blocks, "token_input": self.token_input}

    def head_parameters(self, hidden_size: int) -> Parameters:
        """Parameters that the model has once, between its layers and the final norm."""
        yield from ()


class HeadInput(Part, frozen=True, array_like=True):
    """What the layers of a head read: projection([norm(token); norm(hidden)]).

    Here token is the embedding of the next token, and hidden the normed output of the model that the head belongs to.
    The head guesses the token after the next one with that model's lm_head, and reads its own output as `hidden` behind
    a guess.

    With `sources`, hidden is the projection of what these layers of the model read, and the attention of the head's
    layer reads [norm(token); norm(hidden)].
    """

    norm: Norm | None = None
    """The kind of both norms; None: there are none (EAGLE)."""
    bias: bool = False
    hidden_first: bool = False
    """Whether `hidden` comes first in the input of the projection (MiMo)."""
    output_norm: bool = False
    """Whether a final norm comes before the lm_head."""
    returns_normed: bool = False
    """Whether the normed output is read behind a guess."""
    place: int = 0
    """The number of its layer in the checkpoint of the model; for names of weights only."""
    sources: tuple[int, ...] = ()
    """Layers of the model, in the order in which the projection reads their inputs (EAGLE 3)."""
    own_lm_head: bool = False
    """Whether the head has an lm_head of its own, with `vocab_size` rows."""
    names_tokens: bool = False
    """Whether the lm_head has some of the model's tokens: row i is token i + offset i."""
    sources_norm: bool = False
    """Whether a norm over all that the projection reads comes before it; only with `sources`."""
    source_norms: bool = False
    """Whether what each of the layers reads has a norm of its own before the projection; only with `sources`."""
    residual_normed: bool = False
    """Whether norm(hidden) goes around the attention, and not hidden; only with `sources`."""

    def parameters(self, hidden_size: int) -> Parameters:
        """The parameters, see `models.parameters`."""
        yield from norm_parameters("head_input.token_norm", self.norm, hidden_size)
        yield from norm_parameters("head_input.hidden_norm", self.norm, hidden_size)
        inputs = len(self.sources) or 2
        if self.sources_norm:
            yield from norm_parameters("head_input.sources_norm", self.norm, inputs * hidden_size)
        for number in range(len(self.sources) * self.source_norms):
            yield from norm_parameters(f"head_input.source_norms.{number}", self.norm, hidden_size)
        yield from linear_parameters("head_input.projection", hidden_size, inputs * hidden_size, self.bias)

    def parameters_of_lm_head(self, vocab_size: int, hidden_size: int) -> Parameters:
        """The parameters of an lm_head of its own."""
        if self.own_lm_head:
            yield from linear_parameters("lm_head", vocab_size, hidden_size)
        if self.names_tokens:
            yield "head_input.token_offsets.bias", (vocab_size,)


class DecoderSpec(Part, frozen=True, array_like=True, cache_hash=True):
    """A decoder-only language model, or a head of one."""

    words: ClassVar[Mapping[str, str]] = {"logits_scale": "scaled logits"}

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    final_norm: Norm
    max_position_embeddings: int
    """Longest sequence that the configuration allows, rope scaling included."""
    dtype: DType
    """Type of the checkpoint."""
    tied_embeddings: bool = False
    embedding_scale: float = 1.0
    """Factor of token embeddings, rounded to the activations' type (Gemma)."""
    learned_positions: int | None = None
    """Number of rows of a learned position embedding (GPT-2); None: there is none."""
    lm_head_bias: bool = False
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    """Factor of the logits (Cohere, Granite)."""
    num_labels: int | None = None
    """Rows of the classifier in the place of the lm_head; None: the model has an lm_head."""
    head_input: HeadInput | None = None
    """Set: these are the layers of a head. It has no embedding, and perhaps no final norm and no lm_head."""

    @property
    def token_input(self) -> TokenInput | None:
        """What each layer reads of the token itself. All layers have one of the same size, or none has one."""
        return self.layers[0].token_input

    @property
    def residual_streams(self) -> int:
        """Number of residual streams. All layers have as many."""
        return self.layers[0].residual_streams

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a state for each request."""
        return any(layer.attention.keeps_state for layer in self.layers)


class TensorSource(msgspec.Struct, frozen=True, array_like=True):
    """The place of a canonical parameter in a checkpoint.

    The parameter is the tensor `key`, or a part of it, taken in this order: one of the tensors that it stacks
    (`index`); its transpose, if the file stores [in, out]; some rows; some columns.
    """

    key: str
    transposed: bool = False
    rows: tuple[int, int] | None = None
    """(start, count) along the parameter's dim 0, counted after transposition."""
    aliases: tuple[str, ...] = ()
    """Other names of the tensor, for checkpoints without `key`. The first one that exists is used."""
    row_step: int = 1
    """Distance of neighbouring rows of the parameter: 2 if the rows of two parameters alternate. It needs `rows`."""
    index: tuple[int, int] | None = None
    """(index, count): the tensor stacks `count` tensors along a first dim, for example those of all experts."""
    columns: tuple[int, int] | None = None
    """(start, count) along the parameter's dim 1; only for tensors that are not transposed."""
    squeezed: bool = False
    """Whether the tensor has a dim of 1 behind the first one that the parameter lacks: the weight of a convolution."""
    apart: str = ""
    """The name of the parameter's own tensor in checkpoints whose quantizer took stacked tensors apart: [out, in]."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor for a parameter with `shape`, if no other parameter has later rows or columns of it."""
        if self.rows is not None:
            start, count = self.rows
            shape = (start - start % self.row_step + count * self.row_step, *shape[1:])
        if self.columns is not None:
            shape = (shape[0], sum(self.columns))
        if self.transposed:
            shape = shape[::-1]
        if self.squeezed:
            shape = (shape[0], 1, *shape[1:])
        return shape if self.index is None else (self.index[1], *shape)
