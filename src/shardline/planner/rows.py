"""Published rows: reading them, and making a layout and a load of each."""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from shardline.models.planning import PlannedModel
from shardline.models.sizes import stage_spans
from shardline.models.step_work import StepWork, step_work
from shardline.models.stored_weights import usual_rules
from shardline.planner import vllm
from shardline.planner.catalog import find_model
from shardline.planner.cluster import Cluster, parse_cluster
from shardline.planner.hardware import Gpu
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import bits_label, fit, stored_weights
from shardline.planner.offline import bench_limits, num_prompts
from shardline.planner.published import published_names
from shardline.planner.timing import Load, LoopSteps, loop_steps

CHUNK = 8192
"""Prompt tokens in a step: the default of vLLM on large GPUs, and near those of other engines."""
_RANDOM_SHARE = 0.9
"""Mean of lengths that are drawn from 80% to 100% of the stated ones."""
_PROMPT_GROUPS = re.compile(r"\d+P\+(\d+)D")
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
    """Requests at once, over all replicas; None: as many as fit, or another kind of load."""
    is_offline: bool
    """Whether all requests were there from the start, as many running as fit."""
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
        return (self.gpu, self.layout, self.running, self.input_len, self.output_len, self.ttft, self.tpot)


@dataclass(frozen=True)
class Skipped:
    """A row that no prediction is made for, and why."""

    number: int
    why: str
    names_layout: bool


def read_rows(path: Path) -> tuple[list[Row], list[Skipped]]:
    """The rows of a CSV file in the form of published_results.csv.

    Raises:
        ValueError: the file cannot be read, or it has other columns.
    """
    try:
        with open_table(path) as stream:
            table = list(csv.DictReader(stream))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    needed = {"model", "gpu", "tp", "engine", "isl", "osl"}
    if not table or not needed <= set(table[0]):
        raise ValueError(f"{path} must be a table with the columns {', '.join(sorted(needed))}")
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for number, one in enumerate(table, 2):
        try:
            rows.append(_row(number, one))
        except (ValueError, TypeError, KeyError) as error:
            skipped.append(Skipped(number, str(error), bool(one.get("tp"))))
    return rows, skipped


def open_table(path: Path) -> TextIO:
    """A CSV file, which may be compressed (.gz), for reading.

    Raises:
        OSError: it cannot be opened.
    """
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _row(number: int, one: Mapping[str, str]) -> Row:
    if not one["tp"]:
        raise ValueError("no tensor-parallel size")
    tensor, expert = _size(one, "tp"), _size(one, "ep")
    data, has_prompt_groups = _replicas(one)
    model = find_model(_plain_name(one["model"]))
    share = _RANDOM_SHARE if "range_ratio 0.8" in one.get("notes", "") else 1.0
    load = one.get("concurrency_or_rate", "")
    is_one_prompt = "single-request prefill" in one.get("load_type", "")
    if not one["isl"] or not one["osl"]:
        raise ValueError("no lengths")
    stated = Layout(
        _engine(one["engine"]),
        tensor,
        _size(one, "pp"),
        data,
        whole_experts=expert > 1,
        weights=read_label(model, one.get("precision", "")),
        kv="fp8" if "kv-fp8" in one.get("precision", "") else "auto",
    )
    layout = actual_layout(stated, expert)
    decoding = decoding_part(layout, model)
    return Row(
        number=number,
        model=model.name,
        gpu=re.split(r"[/(]", one["gpu"])[0].strip(),
        engine=stated.engine,
        tier=one.get("tier", ""),
        layout=decoding,
        running=1.0 if is_one_prompt else _concurrency(load),
        is_offline="offline" in one.get("load_type", "").lower(),
        equal_lengths=share == 1.0,
        prompts_apart=has_prompt_groups or decoding != layout,
        input_len=share * float(one["isl"]),
        output_len=share * float(one["osl"]),
        ttft=float(one["isl"]) / float(one["total_tok_s"]) if is_one_prompt else _milliseconds(one.get("ttft_ms")),
        tpot=_milliseconds(one.get("tpot_ms")),
        output_tok_s=_output_rate(one),
    )


def _size(one: Mapping[str, str], axis: str) -> int:
    """The size of an axis; 1 if the row does not state it."""
    text = one.get(axis) or "1"
    if not text.isdecimal():
        raise ValueError(f"{axis} {text!r} is no size of one group of ranks")
    return max(1, int(text))


def _replicas(one: Mapping[str, str]) -> tuple[int, bool]:
    """(data-parallel replicas that decode, whether the row states others for prompts, as in "8P+8D")."""
    groups = _PROMPT_GROUPS.fullmatch(one.get("dp") or "")
    return (int(groups.group(1)), True) if groups else (_size(one, "dp"), False)


def _concurrency(load: str) -> float | None:
    """Requests at once; None: the row states none, or another kind of load."""
    number = load.split(" ")[0]
    return float(number) if number and "qps" not in load and "per GPU" not in load else None


def _plain_name(name: str) -> str:
    return name.split(" ")[0] if "/" in name else name


def _engine(name: str) -> str:
    """The engine whose constants and scheduling predict a row: vLLM for engines without published rows."""
    plain = name.lower().replace("-", "")
    if "trtllm" in plain or "tensorrt" in plain:
        return "trtllm"
    return "sglang" if plain.startswith("sglang") else "vllm"


def _output_rate(one: Mapping[str, str]) -> float | None:
    """Output tokens per second; if only all tokens are stated, the share of the outputs."""
    if one.get("output_tok_s"):
        return float(one["output_tok_s"])
    if one.get("total_tok_s") and float(one["osl"]) > 1:
        return float(one["total_tok_s"]) * float(one["osl"]) / (float(one["isl"]) + float(one["osl"]))
    return None


def _milliseconds(text: str | None) -> float | None:
    return float(text) / 1000 if text else None


def read_label(model: PlannedModel, precision: str) -> str:
    """The label of the weights for a row's precision: "fp4" means the 4-bit floats that the model is published in."""
    own = bits_label(model)
    wanted = precision.split("/")[0].strip().lower()
    wanted = published_names().labels.get(wanted, wanted)
    if wanted in ("", "native") or wanted.startswith("weights native"):
        return own
    if wanted == own or wanted == "bf16":
        return wanted
    if wanted == "fp4":
        return own if own.endswith("fp4") else "nvfp4"
    if own.endswith("fp4"):
        # The model exists in its own 4 bits only, and the row names the format of the arithmetic.
        return own
    if wanted not in usual_rules():
        raise ValueError(f"unknown precision {precision!r}")
    return wanted


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
        running, chunk = (row.running or 1.0), CHUNK
        if row.running is None:
            running, chunk = self._offline_load(row, layout, cluster)
        prefill_first = row.engine in _PREFILL_FIRST
        load = Load(
            max(1.0, running / layout.data),
            row.input_len,
            row.output_len,
            chunk,
            prefill_first,
            prefill_first and row.equal_lengths,
            layout.lockstep,
            row.prompts_apart,
            saturated=row.running is None,
        )
        return loop_steps(work, cluster, load, layout.pipeline)

    def _offline_load(self, row: Row, layout: Layout, cluster: Cluster) -> tuple[float, int]:
        """(requests that run at once over all replicas, most tokens in a step) of an offline row.

        Raises:
            ValueError: not one request fits.
        """
        most, chunk = self._most_running(row, layout, cluster), CHUNK
        if row.engine == "trtllm":
            limit, chunk = bench_limits(self._model(row.model), layout, cluster, row.input_len, row.output_len)
            most = min(most, float(limit * layout.data * layout.pipeline))
        # The last of several rounds has fewer requests. A request's time grows evenly with the number running, so
        # equal rounds take as long together.
        prompts = num_prompts(row.input_len, row.output_len)
        return prompts / math.ceil(prompts / most), chunk

    def _most_running(self, row: Row, layout: Layout, cluster: Cluster) -> float:
        """Requests of a row that fit at once, over all replicas, by vLLM's accounting.

        Raises:
            ValueError: not one fits.
        """
        utilization, most, sampled = _MEMORY[row.engine]
        length = math.ceil(row.input_len + row.output_len)
        model = self._model(row.model)
        for share in (utilization, _FULLEST):
            demand = Demand(length, utilization=share, max_num_seqs=sampled)
            found = fit(model, replace(layout, engine="vllm"), cluster, demand)
            if found.verdict != "no":
                break
        else:
            raise ValueError(found.why_not)
        return min(found.concurrency, float(most * layout.data))

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
