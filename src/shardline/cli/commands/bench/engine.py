"""`shardline bench throughput|latency`: the speed of an engine on this machine, without a server."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline.benchmark.workload import WORKLOADS, random_prompts
from shardline.cli.flags import add_engine_flags, add_refused_flags, engine_config

if TYPE_CHECKING:
    from shardline.api.batch import RequestTimes
    from shardline.api.llm import LLM
    from shardline.api.outputs import RequestOutput
    from shardline.messages.stats import EngineStats


_PERCENTILES = (50, 90, 99)
_LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)

_REFUSED_BY_LATENCY = {
    "this bench generates one text for each prompt; LLM.beam_search has no times of requests": ("use-beam-search",),
    "Shardline has no profiler": ("profile",),
    "the engine's time is reported by itself, see engine overhead": ("disable-detokenize",),
}
_REFUSED_BY_THROUGHPUT = {
    "prompts are random tokens (--input-len, --output-len, --workload); `bench serve` has datasets": (
        "dataset-name", "dataset-path", "dataset", "no-oversample", "enable-multimodal-chat", "custom-output-len",
        "hf-subset", "hf-split", "hf-name", "prefix-len", "prefix-repetition-prefix-len",
        "prefix-repetition-suffix-len", "prefix-repetition-num-prefixes", "prefix-repetition-output-len",
        "random-input-len", "random-output-len", "random-range-ratio", "random-prefix-len", "random-batch-size",
        "no-reranker", "random-mm-base-items-per-request", "random-mm-num-mm-items-range-ratio",
        "random-mm-limit-mm-per-prompt", "random-mm-bucket-config", "asr-min-audio-len-sec", "asr-max-audio-len-sec",
    ),
    "only Shardline's engine is measured; see perf/peers for others": (
        "backend", "hf-max-batch-size", "hf-enable-torch-compile",
    ),
    "all prompts are submitted at once": ("async-engine", "prequeue-requests"),
    "the engine's time is reported by itself, see engine overhead": ("disable-detokenize",),
    "Shardline has no profiler": ("profile",),
    "this bench runs the base model; measure adapters through a server": ("lora-path", "lora-assignment"),
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The results of a benchmark. Times are in seconds; percentiles are keyed by their number."""

    name: str
    num_prompts: int
    prompt_tokens: int
    generation_tokens: int
    seconds: float
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    ttft: dict[int, float]
    """From the submission of a request to its first token, waiting included."""
    tpot: dict[int, float]
    """Between output tokens, averaged over each request."""
    latency: dict[int, float]
    """Time of a request (throughput) or of a whole batch (latency)."""
    num_steps: int
    engine_seconds_per_step: float
    """The engine loop's own time: scheduler, block pool and messages, without the workers' steps."""
    step_seconds_per_step: float
    """The workers' time for a step."""

    def lines(self) -> list[str]:
        return [
            f"{self.name}: {self.num_prompts} prompts in {self.seconds:.2f} s",
            f"prompt tokens      {self.prompt_tokens:>10}  {self.prompt_tokens_per_second:10.1f} tokens/s",
            f"generated tokens   {self.generation_tokens:>10}  {self.generation_tokens_per_second:10.1f} tokens/s",
            f"TTFT      {_in_ms(self.ttft)}",
            f"TPOT      {_in_ms(self.tpot)}",
            f"latency   {_in_ms(self.latency)}",
            f"engine overhead    {1e3 * self.engine_seconds_per_step:10.3f} ms a step, {self.num_steps} steps of "
            f"{1e3 * self.step_seconds_per_step:.2f} ms in the workers",
        ]


def add_parsers(kinds: Any) -> None:
    throughput = kinds.add_parser("throughput", help="many prompts at once", description="Run many prompts at once.")
    _add_workload_flags(throughput, input_len=128, output_len=128)
    throughput.add_argument("--num-prompts", type=_positive_int, default=1000, help="number of prompts (default: 1000)")
    throughput.add_argument("--num-warmups", type=int, default=0, help="unmeasured prompts before (default: 0)")
    add_refused_flags(throughput, _REFUSED_BY_THROUGHPUT)
    add_engine_flags(throughput)
    throughput.set_defaults(run=run_throughput)
    latency = kinds.add_parser("latency", help="one batch at a time", description="Run one batch at a time.")
    _add_workload_flags(latency, input_len=32, output_len=128)
    latency.add_argument("--batch-size", type=_positive_int, default=8, help="prompts in a batch (default: 8)")
    latency.add_argument("--num-iters", type=_positive_int, default=30, help="batches measured (default: 30)")
    latency.add_argument("--num-iters-warmup", type=int, default=10, help="batches before these (default: 10)")
    add_refused_flags(latency, _REFUSED_BY_LATENCY)
    add_engine_flags(latency)
    latency.set_defaults(run=run_latency)


def run_throughput(args: argparse.Namespace) -> int:
    """Run all prompts at once: measures tokens per second, and the times of each request."""
    with _open_llm(args) as llm:
        if args.num_warmups > 0:
            llm.generate_timed(*_make_workload(args, llm, min(args.num_warmups, args.num_prompts)))
        measurement = _Measurement(llm)
        prompts, params = _make_workload(args, llm, args.num_prompts)
        outputs, times = llm.generate_timed(prompts, params, use_tqdm=True)
        measurement.add_batch(outputs, times)
        report = measurement.report("throughput", [request.finished - request.submitted for request in times])
    total = report.prompt_tokens + report.generation_tokens
    print(
        f"Throughput: {report.num_prompts / report.seconds:.2f} requests/s, "
        f"{total / report.seconds:.2f} total tokens/s, {report.generation_tokens_per_second:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {report.prompt_tokens}")
    print(f"Total num output tokens:  {report.generation_tokens}")
    result = {
        "model_id": llm.config.model.model,
        "elapsed_time": report.seconds,
        "num_requests": report.num_prompts,
        "total_num_tokens": total,
        "requests_per_second": report.num_prompts / report.seconds,
        "tokens_per_second": total / report.seconds,
    }
    return _publish_report(report, result, args.output_json)


def run_latency(args: argparse.Namespace) -> int:
    """Run batch after batch: measures the time of each batch."""
    with _open_llm(args) as llm:
        for _ in range(args.num_iters_warmup):
            llm.generate_timed(*_make_workload(args, llm, args.batch_size))
        measurement = _Measurement(llm)
        batches = []
        for _ in range(args.num_iters):
            outputs, times = llm.generate_timed(*_make_workload(args, llm, args.batch_size))
            batches.append(measurement.add_batch(outputs, times))
        report = measurement.report("latency", batches)
    average = sum(batches) / len(batches)
    percentiles = {percent: percentile(batches, percent) for percent in _LATENCY_PERCENTILES}
    print(f"Avg latency: {average} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    result = {
        "model_id": llm.config.model.model,
        "avg_latency": average,
        "latencies": batches,
        "percentiles": percentiles,
    }
    return _publish_report(report, result, args.output_json)


class _Measurement:
    """Measures batches, and the engine's counters since the construction of this object."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._before = self._stats()
        self._seconds = 0.0
        self._outputs: list[RequestOutput] = []
        self._times: list[RequestTimes] = []

    def add_batch(self, outputs: Sequence[RequestOutput], times: Sequence[RequestTimes]) -> float:
        """Add a batch and return its seconds, from the submission of its first request to its last token."""
        seconds = max(request.finished for request in times) - min(request.submitted for request in times)
        self._seconds += seconds
        self._outputs += outputs
        self._times += times
        return seconds

    def report(self, name: str, latencies: Sequence[float]) -> Report:
        """The report on all added batches.

        Raises:
            RuntimeError: a request failed.
        """
        choices = [choice for output in self._outputs for choice in output.outputs]
        failed = [choice for choice in choices if choice.finish_reason == "error"]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(choices)} requests failed: {failed[0].error}")
        now, before = self._stats(), self._before
        steps = max(1, now.num_steps - before.num_steps)
        prompt_tokens = sum(len(output.prompt_token_ids) for output in self._outputs)
        generated = [len(choice.token_ids) for choice in choices]
        tpots = [
            (request.finished - request.first_token) / (count - 1)
            for request, count in zip(self._times, generated, strict=True)
            if count > 1
        ]
        return Report(
            name=name,
            num_prompts=len(self._outputs),
            prompt_tokens=prompt_tokens,
            generation_tokens=sum(generated),
            seconds=self._seconds,
            prompt_tokens_per_second=prompt_tokens / self._seconds,
            generation_tokens_per_second=sum(generated) / self._seconds,
            ttft=_percentiles([request.first_token - request.submitted for request in self._times]),
            tpot=_percentiles(tpots),
            latency=_percentiles(latencies),
            num_steps=now.num_steps - before.num_steps,
            engine_seconds_per_step=(now.engine_seconds - before.engine_seconds) / steps,
            step_seconds_per_step=(now.step_seconds - before.step_seconds) / steps,
        )

    def _stats(self) -> EngineStats:
        from shardline.messages.stats import merge_stats

        return merge_stats(self._llm.stats())


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` percent of `values` lie, interpolated linearly; 0 without values."""
    import numpy as np

    return float(np.percentile(values, percent)) if values else 0.0


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    return {percent: percentile(values, percent) for percent in _PERCENTILES}


def _in_ms(values: dict[int, float]) -> str:
    return "  ".join(f"p{percent} {1e3 * value:9.2f} ms" for percent, value in values.items())


def _add_workload_flags(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload",
        choices=sorted(WORKLOADS),
        help="a named greedy workload instead of the other options of this group: "
        + "; ".join(f"{name} {w.num_prompts} x {w.input_len} in, {w.output_len} out" for name, w in WORKLOADS.items()),
    )
    group.add_argument(
        "--input-len", type=_positive_int, default=input_len, help=f"prompt tokens (default: {input_len})"
    )
    group.add_argument(
        "--output-len", type=_positive_int, default=output_len, help=f"output tokens (default: {output_len})"
    )
    group.add_argument("--temperature", type=float, default=1.0, help="0: greedy (default: 1)")
    group.add_argument("--n", type=_positive_int, default=1, help="outputs of every prompt (default: 1)")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="also write the result to this file")


def _open_llm(args: argparse.Namespace) -> LLM:
    from shardline.api.llm import LLM
    from shardline.log import configure_logging

    path = args.output_json
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"--output-json {path}: the folder {path.parent} does not exist")
    configure_logging()
    args.shared_len = 0
    if args.workload is not None:
        workload = WORKLOADS[args.workload]
        args.num_prompts = args.batch_size = workload.num_prompts
        args.input_len, args.output_len, args.shared_len = workload.input_len, workload.output_len, workload.shared_len
        args.temperature = 0.0
        args.num_warmups = 2
    llm = LLM.from_config(engine_config(args))
    if args.input_len + args.output_len > llm.max_model_len:
        llm.close()
        raise ValueError(
            f"--input-len {args.input_len} and --output-len {args.output_len} are together more than the model's "
            f"maximum length, {llm.max_model_len} tokens"
        )
    # Warm-up and measurement draw from one generator, so that no prompt is in the prefix cache.
    args.prompts = random.Random(llm.config.model.seed)
    return llm


def _make_workload(args: argparse.Namespace, llm: LLM, count: int) -> tuple[list[list[int]], Any]:
    """`count` prompts of random tokens, and parameters with which every output has exactly --output-len tokens."""
    from shardline.sampling_params import SamplingParams

    prompts = random_prompts(args.prompts, llm.vocab_size, count, args.input_len, args.shared_len)
    return prompts, SamplingParams(n=args.n, temperature=args.temperature, max_tokens=args.output_len, ignore_eos=True)


def _publish_report(report: Report, result: dict[str, Any], path: Path | None) -> int:
    """Print the report; write it with `result`, which has vLLM's keys."""
    print("\n".join(report.lines()))
    if path is not None:
        path.write_text(json.dumps({**result, **asdict(report)}, indent=2) + "\n", encoding="utf-8")
    return 0


def _positive_int(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
