"""Feed-forward blocks. Each says its own weights, how ranks share them, and how much it computes and exchanges."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from shardline.models.partition import Span, split_dim
from shardline.models.parts import Activation, Norm, Parameters, Part, linear_parameters, norm_parameters


class Routing(Part, frozen=True, array_like=True):
    """How a token chooses experts: the `experts_per_token` best fp32 scores, and the lowest id on ties."""

    words: ClassVar[Mapping[str, str]] = {
        "logits_bias": "bias of a router's logits",
        "logits_scale": "scale of a router's logits",
        "expert_scale": "scale of experts' weights",
        "scales_input": "scale of experts' inputs",
    }

    num_experts: int
    experts_per_token: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits over all experts. It is applied before experts are chosen."""
    normalized: bool = True
    """Whether the chosen experts' scores are divided by their sum."""
    scale: float = 1.0
    """Factor of the experts' weights, applied last."""
    num_groups: int = 1
    """Experts form groups of equal size. Only experts of the best `top_groups` groups are eligible."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    """How the score of a group follows from the scores of its experts."""
    correction_bias: bool = False
    """Whether a learned bias per expert is added to the scores for choosing; it is not in the weights (DeepSeek-V3)."""
    logits_bias: bool = False
    """Whether a learned bias per expert is added to the router's logits (gpt-oss)."""
    logits_scale: float = 1.0
    """Factor of the router's logits."""
    expert_scale: bool = False
    """Whether each expert has a learned factor of its weight, applied last (Gemma 4)."""
    scales_input: bool = False
    """Whether a token's weight multiplies the expert's input instead of its output (Llama 4). A token then has one
    expert."""

    def parameters(self, hidden_size: int) -> Parameters:
        """The parameters that make the logits and choose experts."""
        yield from linear_parameters("feed_forward.router", self.num_experts, hidden_size, self.correction_bias)
        if self.logits_bias:
            yield "feed_forward.router_logits.bias", (self.num_experts,)

    def experts_met(self, num_tokens: float) -> float:
        """Expected number of experts that `num_tokens` tokens choose, if they choose at random and independently."""
        share = self.experts_per_token / self.num_experts
        return self.num_experts * float(1 - (1 - share) ** num_tokens)

    def ranks_met(self, ranks: int) -> float:
        """Expected number of `ranks` that have at least one of a token's experts, if it chooses at random."""
        total, held = self.num_experts, self.num_experts / ranks
        missed = math.prod(max(0.0, total - held - index) / (total - index) for index in range(self.experts_per_token))
        return ranks * (1 - missed)


class Dense(Part, frozen=True, array_like=True, tag=True):
    """Feed-forward block: down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False

    def special_needs(self) -> Iterator[tuple[str, str]]:
        """See `Part.special_needs`."""
        is_clamped = self.activation == "clamped_swish"
        yield self.activation, "clamped gate" if is_clamped else f"activation {self.activation}"

    @property
    def routing(self) -> Routing | None:
        """How tokens choose experts; None: there are none."""
        return None

    @property
    def block(self) -> Dense:
        """The block, or one of the experts."""
        return self

    @property
    def narrowest(self) -> int:
        """The smallest intermediate size; of no block, the largest number."""
        return self.intermediate_size or sys.maxsize

    @property
    def projected_size(self) -> int:
        """Elements per token in the output of the first projections."""
        return (1 + self.gated) * self.intermediate_size

    @property
    def num_launches(self) -> int:
        """Kernels in a usual implementation, the norm before it included."""
        return 4 if self.intermediate_size else 0

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """See `Attention.gathered`."""
        return (self.intermediate_size + hidden_size, 2) if self.intermediate_size else (0, 0)

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> Parameters:
        """The parameters, of the first `num_experts` experts only, see `models.parameters`."""
        if self.intermediate_size:
            yield from self.linears("feed_forward", hidden_size)

    def linears(self, name: str, hidden_size: int) -> Parameters:
        """The parameters of the linears, with names below `name`."""
        for part in ("gate", "up") if self.gated else ("up",):
            yield from linear_parameters(f"{name}.{part}", self.intermediate_size, hidden_size, self.bias)
        yield from linear_parameters(f"{name}.down", hidden_size, self.intermediate_size, self.bias)

    def expert_width(self, hidden_size: int) -> int:
        """Elements of an expert's inputs and outputs."""
        return hidden_size

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """What one of `ranks` has of parameter `part`: all linears are split by the intermediate size.

        See `Attention.split`, where the output projection stands for `down`.
        """
        if part not in ("feed_forward.gate", "feed_forward.up", "feed_forward.down"):
            raise KeyError(part)
        return split_dim(self.intermediate_size, ranks)[rank]


class MoE(Part, frozen=True, array_like=True, tag=True):
    """Mixture of experts: the sum of weight * expert(x) over a token's chosen experts, plus the shared block."""

    words: ClassVar[Mapping[str, str]] = {
        "own_norms": "experts beside a dense block",
        "latent": "experts in a smaller space",
    }

    routing: Routing
    expert: Dense
    shared: Dense | None = None
    """A block for every token. It is as wide as all shared experts together."""
    shared_gate: bool = False
    """Whether the shared block's output is multiplied by sigmoid(x . gate) (Qwen2-MoE)."""
    own_norms: Norm | None = None
    """The router and the experts read norms of their own of the residual stream, and the outputs of the experts and of
    the shared block are normalised before they are added (Gemma 4)."""
    latent: int | None = None
    """Elements of the inputs and outputs of experts, with projections into that space and out of it (Nemotron 3); None:
    as many as the residual stream has."""

    def special_needs(self) -> Iterator[tuple[str, str]]:
        """See `Part.special_needs`."""
        if self.expert.bias:
            yield "expert_bias", "biases of experts"

    @property
    def block(self) -> Dense:
        """One of the experts."""
        return self.expert

    @property
    def narrowest(self) -> int:
        """See `Dense.narrowest`."""
        blocks = [self.expert] if self.shared is None else [self.expert, self.shared]
        return min(block.intermediate_size for block in blocks)

    @property
    def projected_size(self) -> int:
        """See `Dense.projected_size`."""
        shared = 0 if self.shared is None else self.shared.projected_size
        return self.routing.experts_per_token * self.expert.projected_size + shared

    @property
    def num_launches(self) -> int:
        """See `Dense.num_launches`."""
        return 9 + 2 * (self.latent is not None)

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """See `Dense.gathered`."""
        elements = self.routing.experts_per_token * self.expert.intermediate_size + hidden_size
        return (elements, 2) if self.shared is None else (elements + self.shared.intermediate_size, 3)

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> Parameters:
        """See `Dense.parameters`."""
        routing = self.routing
        yield from routing.parameters(hidden_size)
        yield from self.expert_parameters(hidden_size, routing.num_experts if num_experts is None else num_experts)
        if routing.expert_scale:
            yield "feed_forward.expert_scale.bias", (routing.num_experts,)
        for name in ("router", "experts", "experts_output", "shared_output") if self.own_norms else ():
            yield from norm_parameters(f"feed_forward.{name}_norm", self.own_norms, hidden_size)
        if self.shared is not None:
            yield from self.shared.linears("feed_forward.shared", hidden_size)
        if self.shared_gate:
            yield from linear_parameters("feed_forward.shared_gate", 1, hidden_size)

    def expert_parameters(self, hidden_size: int, num_experts: int) -> Parameters:
        """The parameters of the first `num_experts` experts, and of the projections around them."""
        if self.latent is not None:
            yield from linear_parameters("feed_forward.latent_down", self.latent, hidden_size)
            yield from linear_parameters("feed_forward.latent_up", hidden_size, self.latent)
        for expert in range(num_experts):
            yield from self.expert.linears(f"feed_forward.experts.{expert}", self.expert_width(hidden_size))

    def expert_width(self, hidden_size: int) -> int:
        """See `Dense.expert_width`."""
        return hidden_size if self.latent is None else self.latent

    def split(self, part: str, rank: int, ranks: int) -> Span | None:
        """See `Dense.split`. Every rank has the router, its factors, the gate of the shared block, and the projections
        around experts."""
        whole = ("router", "router_logits", "expert_scale", "shared_gate", "latent_down", "latent_up")
        if part.removeprefix("feed_forward.") in whole:
            return None
        name, _, linear = part.rpartition(".")
        block = self.shared if name == "feed_forward.shared" else None
        if name.startswith("feed_forward.experts."):
            block = self.expert
        if block is None:
            raise KeyError(part)
        return block.split(f"feed_forward.{linear}", rank, ranks)


FeedForward = Dense | MoE
