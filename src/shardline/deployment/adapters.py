"""The memory for adapters (LoRA), and the deployments that cannot have any."""

from __future__ import annotations

from shardline.checkpoints.adapter_targets import chosen_kinds
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import NO_ADAPTERS, AdapterPlan
from shardline.deployment.layout import Layout
from shardline.models.adapters import adapter_bytes, is_of_expert
from shardline.models.partition import Span
from shardline.models.parts import DType
from shardline.models.spec import DecoderSpec


def plan_adapters(
    config: EngineConfig, layout: Layout, spec: DecoderSpec, stages: tuple[Span, ...], dtype: DType
) -> AdapterPlan:
    """The adapters that the ranks hold at once.

    Raises:
        ValueError: the deployment cannot have adapters.
    """
    lora = config.lora
    if not lora.enable_lora:
        return NO_ADAPTERS
    if layout.device == "cuda" and layout.kernels != "torch":
        raise ValueError("enable_lora: the Triton kernels have no adapters yet; use --kernels torch, or --device cpu")
    if config.parallel.numerics == "fast" and layout.grid.sharing > 1:
        raise ValueError(
            "enable_lora needs --numerics exact where ranks share layers: then each output has one owner, which adds "
            "the adapter's part"
        )
    kinds, keeps_experts = chosen_kinds(spec, lora.targets), config.parallel.keeps_experts
    if not keeps_experts:  # a rank would need the adapters of other replicas' tokens, or of experts that come later
        kinds = frozenset(kind for kind in kinds if not is_of_expert(kind))
    num_bytes = tuple(
        lora.num_slots
        * adapter_bytes(spec, place, stages, dtype, lora.max_lora_rank, kinds, whole_experts=layout.grid.expert > 1)
        for place in map(layout.grid.place, range(layout.grid.world_size))
    )
    if not any(num_bytes):
        raise ValueError(f"enable_lora: {spec.model_type} has no linear that adapters can change here")
    return AdapterPlan(lora.num_slots, lora.max_lora_rank, num_bytes, tuple(sorted(kinds)), keeps_experts)
