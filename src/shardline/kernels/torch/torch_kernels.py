"""All kernels of the torch back end."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.pages import PageOrder
from shardline.kernels.torch import elementwise, experts, sampling
from shardline.kernels.torch.attention import AttentionKernels
from shardline.kernels.torch.chosen_keys import choose_keys, take_tokens
from shardline.kernels.torch.linear_attention import delta_rule, gate_heads, mamba
from shardline.kernels.torch.low_rank import LowRankKernels


class TorchKernels(LowRankKernels, AttentionKernels):
    """See `contract.Kernels`."""

    add = staticmethod(elementwise.add)
    scale_rows = staticmethod(elementwise.scale_rows)
    quantize_rows = staticmethod(elementwise.quantize_rows)
    rms_norm = staticmethod(elementwise.rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    softcap = staticmethod(elementwise.softcap)
    combine_slots = staticmethod(experts.combine_slots)
    place_slots = staticmethod(experts.place_slots)
    pack_dispatch = staticmethod(experts.pack_dispatch)
    count_exchanged = staticmethod(experts.count_exchanged)
    route_experts = staticmethod(experts.route_experts)
    greedy_argmax = staticmethod(sampling.greedy_argmax)
    row_digests = staticmethod(sampling.row_digests)
    mask_tokens = staticmethod(sampling.mask_tokens)
    penalize = staticmethod(sampling.penalize)
    sample = staticmethod(sampling.sample)
    logprobs = staticmethod(sampling.logprobs)

    take_tokens = staticmethod(take_tokens)
    delta_rule = staticmethod(delta_rule)
    gate_heads = staticmethod(gate_heads)
    mamba = staticmethod(mamba)

    def choose_keys(self, *arguments: Tensor) -> None:
        choose_keys(*arguments, exact=self.is_exact)

    def __init__(self, device: torch.device) -> None:
        LowRankKernels.__init__(self, device)
        AttentionKernels.__init__(self)

    @staticmethod
    def page_order(dtype: torch.dtype) -> PageOrder:
        return "tokens"
