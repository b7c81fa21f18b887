"""Published rows: reading them, and making a layout and a load of each."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from scripts.published import row_fields
from scripts.published.offline import bench_limits, num_prompts
from shardline.models.sizes import stage_spans
from shardline.models.step_work import StepWork, step_work
from shardline.planner import vllm
from shardline.planner.catalog import find_model
from shardline.planner.cluster import Cluster, parse_cluster
from shardline.planner.hardware import Gpu
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import fit, stored_weights
from shardline.planner.planned_model import PlannedModel
from shardline.planner.timing import USUAL_ROUNDS, Load, LoopSteps, by_little, loop_latency, loop_steps, shipped_timing

ROWS = Path(__file__).parents[2] / "perf" / "published" / "results.csv.gz"
CHUNK = 8192
"""Prompt tokens in a step: the default of vLLM on large GPUs, and near those of other engines."""
_FULLEST = 0.98
"""The share of memory that rows use whose layout does not fit the engine's default: they ran."""
_MEMORY = {"vllm": (0.9, 1024, 1024), "sglang": (0.9, 2048, 256), "trtllm": (0.95, 2048, 256)}
"""For each engine: the share of memory that it uses, the most requests at once, and those that its profiled step
samples."""
_PREFILL_FIRST = ("sglang",)
"""Engines that compute all prompts that wait before they decode again, unless told otherwise."""


@dataclass(frozen=True)
class Row:
    """One published measurement. Times in seconds; None: not published."""

    number: int
    model: str
    gpu: str
    engine: str
    tier: str
    layout: Layout
    running: float | None
    """Requests at once, over all replicas; None: those that `rate` needs, or as many as fit."""
    rate: float | None
    """Requests that arrive in a second, over all replicas."""
    rounds: float
    """Requests of the whole run for each that runs at once.

    Rows of equal lengths that do not state it show no start, so it is infinite there.
    """
    is_offline: bool
    """Whether the row is one of an offline benchmark, with all requests there from the start."""
    equal_lengths: bool
    """Whether all requests have the same lengths."""
    prompts_apart: bool
    """Whether other GPUs than those of the layout compute the prompts."""
    input_len: float
    output_len: float
    ttft: float | None
    tpot: float | None
    output_tok_s: float | None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for copies of one measurement."""
        return (self.gpu, self.layout, self.running, self.rate, self.input_len, self.output_len, self.ttft, self.tpot)


@dataclass(frozen=True)
class Skipped:
    """A row that no prediction is made for, and why."""

    number: int
    why: str
    names_layout: bool


def read_rows(path: Path) -> tuple[list[Row], list[Skipped]]:
    """The rows of a CSV file in the form of perf/published/results.csv.gz.

    Raises:
        ValueError: the file cannot be read, or it has other columns.
    """
    try:
        with open_table(path) as stream:
            table = list(csv.DictReader(stream))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    needed = {"model", "gpu", "tp", "engine", "isl", "osl"}
    if not table:
        raise ValueError(f"{path} has no rows below a header with the columns {', '.join(sorted(needed))}")
    if not needed <= set(table[0]):
        raise ValueError(f"{path} must be a table with the columns {', '.join(sorted(needed))}")
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for number, one in enumerate(table, 2):
        try:
            rows.append(_row(number, one))
        except (ValueError, TypeError, KeyError) as error:
            skipped.append(Skipped(number, str(error), _names_layout(one)))
    return rows, skipped


def _names_layout(one: Mapping[str, str]) -> bool:
    try:
        row_fields.sizes(one)
    except ValueError:
        return False
    return True


def open_table(path: Path) -> TextIO:
    """A CSV file, which may be compressed (.gz), for reading.

    Raises:
        OSError: it cannot be opened.
    """
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _row(number: int, one: Mapping[str, str]) -> Row:
    stated, precision = row_fields.sizes(one), one.get("precision") or ""
    model = row_fields.published_model(one["model"] or "")
    load = row_fields.load(one)
    layout = Layout(
        _engine(one["engine"] or ""),
        stated.tensor,
        stated.pipeline,
        stated.data,
        whole_experts=stated.experts > 1,
        weights=row_fields.read_label(model, precision),
        kv=row_fields.kv_label(precision),
    )
    layout = actual_layout(layout, stated.experts)
    decoding = decoding_part(layout, model)
    input_len, output_len = row_fields.lengths(one)
    kind, is_equal = (one.get("load_type") or "").lower(), row_fields.has_equal_lengths(one)
    return Row(
        number=number,
        model=model.name,
        gpu=row_fields.plain_gpu(one["gpu"] or ""),
        engine=layout.engine,
        tier=one.get("tier") or "",
        layout=decoding,
        running=load.running,
        rate=load.rate,
        rounds=row_fields.num_rounds(one, load.running) or (math.inf if is_equal else USUAL_ROUNDS),
        is_offline="offline" in kind,
        equal_lengths=is_equal,
        prompts_apart=stated.has_prompt_groups or decoding != layout or "decode only" in kind,
        input_len=input_len,
        output_len=output_len,
        ttft=row_fields.first_token(one),
        tpot=row_fields.milliseconds(one.get("tpot_ms")),
        output_tok_s=row_fields.output_rate(one, decoding.num_gpus),
    )


def _engine(name: str) -> str:
    """The engine whose constants and scheduling predict a row: vLLM for engines without published rows."""
    plain = name.lower().replace("-", "")
    if "trt" in plain or "tensorrt" in plain:
        return "trtllm"
    return "sglang" if "sglang" in plain else "vllm"


def kv_format(row: Row, gpu: Gpu) -> str:
    """The format of a row's KV cache: the stated one, else what the engine's benchmarks use.

    Those of TensorRT-LLM have FP8 with NVIDIA's checkpoints, which are all those in 4 bits and all of its offline
    table, except with MXFP4 on GPUs that do not compute in 4 bits.
    """
    label = row.layout.weights
    if row.layout.kv != "auto" or row.engine != "trtllm" or label in ("bf16", "fp16", "fp32"):
        return row.layout.kv
    if not row.is_offline and not label.endswith("fp4"):
        return "auto"
    return "auto" if label == "mxfp4" and "fp4" not in gpu.tflops else "fp8"


def actual_layout(layout: Layout, expert_ranks: int) -> Layout:
    """The layout that a row means. Some rows state products of sizes where others state the sizes.

    - tp 64, ep 8 means tp 8: at each concurrency, the row is as fast as the one that says so. The same holds for dp.
    - tp 4, dp 4, ep 16 means four GPUs: attention in four replicas of one GPU, and experts over all of them.
    """
    if expert_ranks > 1 and layout.tensor == expert_ranks**2 and layout.data == 1:
        return replace(layout, tensor=expert_ranks)
    if expert_ranks > 1 and layout.data == expert_ranks**2 and layout.tensor == 1:
        return replace(layout, data=expert_ranks)
    if layout.tensor == layout.data > 1 and layout.tensor**2 == expert_ranks:
        return replace(layout, tensor=1)
    return layout


def decoding_part(layout: Layout, model: PlannedModel) -> Layout:
    """The part of a layout that decodes, if other GPUs compute the prompts.

    Some rows state all GPUs as one tensor-parallel size, among which the heads cannot be divided. The largest power of
    two of them decodes: attention in replicas of one GPU, and experts over all of them.
    """
    tensor = layout.tensor
    if tensor == 1 or all(layer.attention.num_heads % tensor == 0 for layer in model.spec.layers):
        return layout
    return replace(layout, tensor=1, data=1 << (tensor.bit_length() - 1), whole_experts=True)


class Works:
    """The coefficients of layouts, each computed once."""

    def __init__(self, gpus: Mapping[str, Gpu]) -> None:
        self._gpus = gpus
        self._works: dict[object, StepWork] = {}
        self._models: dict[str, PlannedModel] = {}
        self._clusters: dict[tuple[str, int], Cluster] = {}

    def cluster(self, gpu: str, num_gpus: int) -> Cluster:
        """Nodes of eight GPUs; of a rack, as many as its link joins."""
        if (gpu, num_gpus) not in self._clusters:
            one = parse_cluster(gpu, self._gpus)
            size = max(8, one.slowest.link.domain)
            text = f"{num_gpus}x{gpu}" if num_gpus <= size else f"{-(-num_gpus // size)}x{size}x{gpu}"
            self._clusters[gpu, num_gpus] = parse_cluster(text, self._gpus)
        return self._clusters[gpu, num_gpus]

    def steps(self, row: Row) -> LoopSteps:
        """The steps of a row.

        Raises:
            ValueError: the layout is impossible for the model, or the GPU is unknown.
        """
        cluster = self.cluster(row.gpu, row.layout.num_gpus)
        layout = replace(row.layout, kv=kv_format(row, cluster.slowest))
        work = self._work(row.model, layout)
        running, chunk = row.running, CHUNK
        if running is None:
            running, chunk = self._offline_load(row, layout, cluster)
        prefill_first = row.engine in _PREFILL_FIRST
        load = Load(
            max(1.0, running / layout.data),
            row.input_len,
            row.output_len,
            chunk,
            prefill_first,
            prefill_first and row.equal_lengths,
            lockstep=layout.lockstep,
            prompts_apart=row.prompts_apart,
            saturated=row.running is None,
            equal_lengths=row.equal_lengths,
            rounds=row.rounds,
        )

        if row.rate is not None:
            rate, constants = row.rate / layout.data, shipped_timing()[row.engine].constants

            def at(running: float) -> LoopSteps:
                arriving = load._replace(running=running, saturated=False, arrivals=rate)
                return loop_steps(work, cluster, arriving, layout.pipeline)

            served, keeps_up = by_little(
                rate, load.running, lambda value: loop_latency(at(value), constants), row.output_len
            )
            if keeps_up:
                return at(served)
        return loop_steps(work, cluster, load, layout.pipeline)

    def _offline_load(self, row: Row, layout: Layout, cluster: Cluster) -> tuple[float, int]:
        """(requests that run at once over all replicas, most tokens in a step) of a row with as many as fit."""
        most, chunk = self._most_running(row, layout, cluster), CHUNK
        if row.engine == "trtllm":
            limit, chunk = bench_limits(self._model(row.model), layout, cluster, row.input_len, row.output_len)
            most = min(most, float(limit * layout.data * layout.pipeline))
        # The last of several rounds has fewer requests. A request's time grows evenly with the number running, so
        # equal rounds take as long together.
        prompts = num_prompts(row.input_len, row.output_len)
        return prompts / math.ceil(prompts / most), chunk

    def _most_running(self, row: Row, layout: Layout, cluster: Cluster) -> float:
        """Requests of a row that fit at once, over all replicas, by vLLM's accounting."""
        utilization, most, sampled = _MEMORY[row.engine]
        length = math.ceil(row.input_len + row.output_len)
        model = self._model(row.model)
        for share in (utilization, _FULLEST):
            demand = Demand(length, utilization=share, max_num_seqs=sampled)
            found = fit(model, replace(layout, engine="vllm"), cluster, demand)
            if found.verdict != "no":
                return min(found.concurrency, float(most * layout.data))
        # The row was measured, so at least one request fitted.
        return float(layout.data)

    def _work(self, name: str, layout: Layout) -> StepWork:
        key = (name, layout)
        if key not in self._works:
            self._works[key] = planned_work(self._model(name), layout)
        return self._works[key]

    def _model(self, name: str) -> PlannedModel:
        if name not in self._models:
            self._models[name] = find_model(name)
        return self._models[name]


def planned_work(model: PlannedModel, layout: Layout) -> StepWork:
    """The work of the rank with the most, for an engine with vLLM's sharding."""
    stages = stage_spans(model.spec, layout.pipeline)
    stored = stored_weights(model, layout.weights)
    _, place = vllm.weight_bytes(model, stored, layout, stages)
    return step_work(
        model.spec,
        place,
        stages,
        stored,
        "bfloat16" if layout.kv == "auto" else "float8_e4m3fn",
        "vllm",
        whole_experts=layout.whole_experts,
        whole=vllm.WHOLE_PARTS,
    )
