"""The layouts that a search looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardline.checkpoints.planning import PlannedModel
from shardline.models.compressed import is_compressed
from shardline.models.partition import check_tensor_parallel
from shardline.models.spec import MoE
from shardline.planner import vllm
from shardline.planner.cluster import Cluster
from shardline.planner.layout import Layout
from shardline.planner.memory import bits_label, stored_weights

_EVERY_NUMBER = 8
"""GPUs up to which every smaller number of them is looked at."""


@dataclass(frozen=True)
class Fixed:
    """Choices that the user has made; None: to be searched."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    whole_experts: bool | None = None
    weights: str | None = None
    kv: str | None = None
    context: int | None = None
    numerics: str | None = None


def check_sizes(model: PlannedModel, cluster: Cluster, engine: str, fixed: Fixed) -> None:
    """Refuse parallel sizes that no layout of the engine can have, whatever else is searched.

    Raises:
        ValueError: the heads forbid the tensor-parallel size, there are too few GPUs, or a format is unknown.
    """
    tensor, whole = fixed.tensor or 1, fixed.whole_experts is not False
    if fixed.weights:
        stored_weights(model, fixed.weights)
    if engine == "shardline":
        check_tensor_parallel(model.spec, tensor)
    else:
        has_experts = any(isinstance(layer.feed_forward, MoE) for layer in model.spec.layers)
        asked = Layout(engine, tensor, data=fixed.data or 2, whole_experts=whole and has_experts, kv=fixed.kv or "auto")
        why = vllm.refusal(model.spec, model.stored(), asked)
        if why:
            raise ValueError(why)
    needed = tensor * (fixed.pipeline or 1) * (fixed.data or 1)
    if needed > cluster.num_gpus:
        raise ValueError(f"the parallel sizes need {needed} GPUs, and {cluster.name} has {cluster.num_gpus}")


def layouts(model: PlannedModel, cluster: Cluster, engine: str, fixed: Fixed) -> Iterator[Layout]:
    """Every layout that the fixed choices allow, up to all GPUs of the cluster."""
    has_experts = any(hasattr(layer.feed_forward, "routing") for layer in model.spec.layers)
    experts = (False, True) if has_experts else (False,)
    labels = [fixed.weights] if fixed.weights else _labels(model, cluster, engine)
    numerics = fixed.numerics if engine == "shardline" and fixed.numerics else "exact"
    caches = [fixed.kv] if fixed.kv else _kv_labels(model, cluster, engine)
    for num_gpus in _counts(cluster, fixed):
        for tensor in _divisors(num_gpus, fixed.tensor):
            for pipeline in _divisors(num_gpus // tensor, fixed.pipeline):
                data = num_gpus // tensor // pipeline
                if (fixed.data not in (None, data)) or pipeline > len(model.spec.layers):
                    continue
                for whole in experts if fixed.whole_experts is None else (fixed.whole_experts,):
                    if whole and tensor * data == 1:
                        continue
                    for label in labels:
                        for kv in caches:
                            yield Layout(engine, tensor, pipeline, data, whole, label, kv, numerics=numerics)
    if engine == "shardline" and {fixed.pipeline, fixed.data} <= {None, 1} and fixed.context is None:
        # No start accepts context parallelism yet. It is shown on all GPUs, so that its price is known.
        for tensor in _divisors(cluster.num_gpus, fixed.tensor):
            if tensor < cluster.num_gpus:
                spread = cluster.num_gpus // tensor
                yield Layout(engine, tensor, weights=labels[0], kv=caches[0], context=spread, numerics=numerics)


def _counts(cluster: Cluster, fixed: Fixed) -> list[int]:
    """Numbers of GPUs to look at: all, half of them and so on; up to 8 every number.

    Fixed sizes that divide none of them add the fewest and the most GPUs on which they work.
    """
    total = cluster.num_gpus
    if total <= _EVERY_NUMBER:
        return list(range(1, total + 1))
    counts = {total >> shift for shift in range(total.bit_length())}
    unit = (fixed.tensor or 1) * (fixed.pipeline or 1) * (fixed.data or 1)
    if unit <= total and all(count % unit for count in counts):
        counts |= {unit, total // unit * unit}
    return sorted(counts)


def _divisors(number: int, only: int | None) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0 and only in (None, n)]


def _labels(model: PlannedModel, cluster: Cluster, engine: str) -> list[str]:
    """The weights to look at: the checkpoint's own, and quantized ones if it is not quantized."""
    own = bits_label(model)
    return [own] if model.rules.rules else [own, *_one_byte(cluster, engine), "int" + "4"]


def _kv_labels(model: PlannedModel, cluster: Cluster, engine: str) -> list[str]:
    if is_compressed(model.spec):
        return ["auto"]  # there is only one: see `vllm.kv_flag`
    return ["auto", *_one_byte(cluster, engine)]


def _one_byte(cluster: Cluster, engine: str) -> list[str]:
    """The first format of one byte in which all of the GPUs compute: floats, and for this engine also integers."""
    labels = [label for label in cluster.slowest.tflops if label.endswith("8")]
    common = [label for label in labels if all(label in gpu.tflops for gpu in cluster.gpus)]
    return [label for label in common if label.startswith("f") or engine == "shardline"][:1]
