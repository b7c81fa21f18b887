"""Feed-forward blocks. Each says its own weights, how ranks share them, and how much it computes and exchanges."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from shardline.models.parts import Activation, Norm, Parameters, linear_parameters, norm_parameters


class Routing(msgspec.Struct, frozen=True, array_like=True):
    """How a token chooses experts: the `experts_per_token` best fp32 scores, and the lowest id on ties."""

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


class Dense(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Feed-forward block: down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False

    whole_parts: ClassVar[tuple[str, ...]] = ()
    """Parts that every rank has undivided."""

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
        """The smallest intermediate size."""
        return self.intermediate_size

    @property
    def projected_size(self) -> int:
        """Elements per token in the output of the first projections."""
        return (1 + self.gated) * self.intermediate_size

    @property
    def num_launches(self) -> int:
        """Kernels in a usual implementation, the norm before it included."""
        return 4 if self.intermediate_size else 0

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """(elements for a token, gathers) that tensor-parallel ranks exchange if no sum crosses a rank."""
        return (self.intermediate_size + hidden_size, 2) if self.intermediate_size else (0, 0)

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> Parameters:
        """The parameters, see `models.parameters`."""
        yield from self.linears("feed_forward", hidden_size)

    def linears(self, name: str, hidden_size: int) -> Parameters:
        """The parameters of the linears, with names below `name`."""
        for part in ("gate", "up") if self.gated else ("up",):
            yield from linear_parameters(f"{name}.{part}", self.intermediate_size, hidden_size, self.bias)
        yield from linear_parameters(f"{name}.down", hidden_size, self.intermediate_size, self.bias)

    def expert_width(self, hidden_size: int) -> int:
        """Elements of an expert's inputs and outputs."""
        return hidden_size

    def norm_of(self, part: str) -> Norm | None:
        """The norm whose weights have the name `part`; None: there is none."""
        return None

    def find_block(self, name: str) -> Dense | None:
        """The block whose linears have names below `name`; None: there is none."""
        return self if name == "feed_forward" else None


class MoE(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mixture of experts: the sum of weight * expert(x) over a token's chosen experts, plus the shared block."""

    routing: Routing
    expert: Dense
    shared: Dense | None = None
    """A block for every token. It is as wide as all shared experts together."""
    shared_gate: bool = False
    """Whether the shared block's output is multiplied by sigmoid(x . gate) (Qwen2-MoE)."""
    own_norms: Norm | None = None
    """The router and the experts read norms of their own of the residual stream, and the outputs of the experts and of
    the shared block are normalised before they are added (Gemma 4)."""

    whole_parts: ClassVar[tuple[str, ...]] = (
        "feed_forward.router",
        "feed_forward.router_logits",
        "feed_forward.expert_scale",
        "feed_forward.shared_gate",
    )
    """Parts that every rank has undivided."""

    @property
    def block(self) -> Dense:
        """One of the experts."""
        return self.expert

    @property
    def narrowest(self) -> int:
        """The smallest intermediate size."""
        blocks = [self.expert] if self.shared is None else [self.expert, self.shared]
        return min(block.intermediate_size for block in blocks)

    @property
    def projected_size(self) -> int:
        """Elements per token in the output of the first projections."""
        shared = 0 if self.shared is None else self.shared.projected_size
        return self.routing.experts_per_token * self.expert.projected_size + shared

    @property
    def num_launches(self) -> int:
        """Kernels in a usual implementation, the norm before it included."""
        return 9

    def gathered(self, hidden_size: int) -> tuple[int, int]:
        """See `Dense.gathered`."""
        elements = self.routing.experts_per_token * self.expert.intermediate_size + hidden_size
        return (elements, 2) if self.shared is None else (elements + self.shared.intermediate_size, 3)

    def parameters(self, hidden_size: int, num_experts: int | None = None) -> Parameters:
        """The parameters, of the first `num_experts` experts only, see `models.parameters`."""
        routing = self.routing
        yield from linear_parameters("feed_forward.router", routing.num_experts, hidden_size, routing.correction_bias)
        if routing.logits_bias:
            yield "feed_forward.router_logits.bias", (routing.num_experts,)
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
        """The parameters of the first `num_experts` experts."""
        for expert in range(num_experts):
            yield from self.expert.linears(f"feed_forward.experts.{expert}", self.expert_width(hidden_size))

    def expert_width(self, hidden_size: int) -> int:
        """Elements of an expert's inputs and outputs."""
        return hidden_size

    def norm_of(self, part: str) -> Norm | None:
        """See `Dense.norm_of`. All norms of the block are alike."""
        return self.own_norms

    def find_block(self, name: str) -> Dense | None:
        """See `Dense.find_block`."""
        if name == "feed_forward.shared":
            return self.shared
        return self.expert if name.startswith("feed_forward.experts.") else None


FeedForward = Dense | MoE
