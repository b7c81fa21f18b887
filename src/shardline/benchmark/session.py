"""From flags to runs: find the model, make the workload, load the server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import uvloop
from tqdm import tqdm

from shardline import env
from shardline.benchmark.backends import BACKENDS, RequestWriter
from shardline.benchmark.datasets import find_dataset
from shardline.benchmark.http_client import HttpClient
from shardline.benchmark.load import Planned, Ramp, RunTrace, arrival_times, run_load
from shardline.benchmark.results import Wanted, summarize
from shardline.benchmark.server_counters import fetch_counters, server_figures
from shardline.benchmark.server_tokenizer import PromptTokenizer, ServerTokenizer
from shardline.benchmark.workload import Sample
from shardline.text.tokenizer import Tokenizer

_SAMPLING = (
    "top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_SECONDS_BETWEEN_CHECKS = 1.0


def run_session(args: argparse.Namespace, wanted: Wanted) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """For each run, the identity of the model and the result. Each run has another seed, so that no prompt is cached.

    Raises:
        ValueError: a flag or the dataset is at fault.
        RuntimeError: the server cannot be reached.
    """
    url = args.base_url.rstrip("/") if args.base_url else _url(args.host, args.port)
    headers = _headers(args)
    model, name = _find_model(args, url, headers)
    tokenizer, tokenizer_id = _load_tokenizer(args, model, lambda: _server_tokenizer(args, url, headers, name))
    identity = {"model_id": model, "tokenizer_id": tokenizer_id}
    if tokenizer is not None:
        wanted = replace(wanted, count_tokens=partial(_count_tokens, tokenizer))
    try:
        for run in range(args.num_runs):
            options = argparse.Namespace(**{**vars(args), "seed": args.seed + run})
            samples = find_dataset(args.dataset_name).load_samples(options, tokenizer)
            times = _arrivals(options, samples)
            trace, figures = uvloop.run(_run_once(options, url, headers, name, samples, times))
            yield identity, summarize(trace, wanted) | figures
    finally:
        if isinstance(tokenizer, ServerTokenizer):
            tokenizer.close()


def _count_tokens(tokenizer: PromptTokenizer, text: str) -> int:
    return len(tokenizer.encode_text(text, add_special_tokens=False))


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_pairs(words: Sequence[str] | None, flag: str) -> dict[str, str]:
    """KEY=VALUE words as a dict.

    Raises:
        ValueError: a word has no =.
    """
    pairs = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{flag} takes KEY=VALUE, got {word!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def _headers(args: argparse.Namespace) -> dict[str, str]:
    key = env.openai_api_key() or env.api_key()
    return ({"Authorization": f"Bearer {key}"} if key else {}) | read_pairs(args.header, "--header")


def _find_model(args: argparse.Namespace, url: str, headers: dict[str, str]) -> tuple[str, str]:
    """The model's id, for its tokenizer, and the name that requests have. Connects to the server in any case."""
    try:
        if args.model is not None:
            if args.ready_check_timeout_sec <= 0:
                uvloop.run(_reach(args, url, None))
            return args.model, args.served_model_name or args.model
        status, body = uvloop.run(_reach(args, url, headers))
    except OSError as error:
        raise RuntimeError(
            f"cannot connect to {url} ({error}); start the server, or give its --host and --port or --base-url"
        ) from error
    try:
        [first, *_] = msgspec.json.decode(body)["data"]
        name = first["id"]
        return first.get("root") or name, args.served_model_name or name
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RuntimeError(f"{url}/v1/models answers {status} and names no model; give --model") from error


async def _reach(args: argparse.Namespace, url: str, headers: dict[str, str] | None) -> tuple[int, bytes]:
    """The status and the body of the list of models; without `headers`, a connection is enough."""
    client = HttpClient(url, insecure=args.insecure)
    try:
        if headers is not None:
            return await client.fetch("GET", "/v1/models", headers)
        await client.check()
        return 0, b""
    finally:
        client.close()


def _server_tokenizer(args: argparse.Namespace, url: str, headers: dict[str, str], model: str) -> ServerTokenizer:
    return ServerTokenizer(HttpClient(url, insecure=args.insecure), headers, model)


def _load_tokenizer(
    args: argparse.Namespace, model: str, ask_server: Callable[[], ServerTokenizer]
) -> tuple[PromptTokenizer | None, str | None]:
    """The tokenizer and its name; None if there is to be none. If it is not named, and the model is not on this host,
    it is the server's, if that has one to ask, and only then one of the hub."""
    from shardline.checkpoints.hub import find_local_model, resolve_tokenizer

    args.tokenizer_folder = None
    if args.skip_tokenizer_init:
        return None, None
    name = args.tokenizer or model
    no_server = ""
    if args.tokenizer is None:
        is_local = False
        with contextlib.suppress(ValueError):
            is_local = find_local_model(name) is not None
        if not is_local:
            try:
                return ask_server(), name
            except OSError as error:
                no_server = f"; the server has none either: {error}"
    try:
        folder = resolve_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"no tokenizer for {name!r} ({error}{no_server}); give --tokenizer FOLDER") from error
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json; give --tokenizer FOLDER")
    args.tokenizer_folder = folder
    return tokenizer, name


def _arrivals(args: argparse.Namespace, samples: Sequence[Sample]) -> list[float]:
    if args.self_timed:
        return [sample.timestamp or 0.0 for sample in samples]
    ramp = None
    if args.ramp_up_strategy is not None:
        ramp = Ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    rng = np.random.default_rng(args.seed)
    return arrival_times(len(samples), args.request_rate, rng, burstiness=args.burstiness, ramp=ramp)


def _own_models(args: argparse.Namespace, count: int) -> Sequence[str | None]:
    """What each request names as its model, as --lora-modules says; None: the same as all others."""
    if not args.own_models:
        return [None] * count
    if args.assignment == "random":
        return random.Random(args.seed).choices(args.own_models, k=count)
    return [args.own_models[index % len(args.own_models)] for index in range(count)]


async def _run_once(
    args: argparse.Namespace,
    url: str,
    headers: dict[str, str],
    model: str,
    samples: Sequence[Sample],
    times: Sequence[float],
) -> tuple[RunTrace, dict[str, Any]]:
    """What the run measured, and what the server's counters say of it."""
    backend = BACKENDS[args.backend]
    client = HttpClient(url, insecure=args.insecure)
    extra = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None and backend.streams}
    if args.ignore_eos and backend.streams:
        extra["ignore_eos"] = True
    extra |= args.extra_body or {}
    writer = RequestWriter(
        client, backend, args.endpoint, model, headers=headers, extra_body=extra, logprobs=args.logprobs
    )
    plan = [
        Planned(
            writer.write(sample, _request_id(args.request_id_prefix, f"{args.seed}-{index}"), own),
            time,
            sample.prompt_len,
            len(sample.prompt) if isinstance(sample.prompt, list) and isinstance(sample.prompt[0], str) else 1,
        )
        for index, (sample, time, own) in enumerate(zip(samples, times, _own_models(args, len(samples)), strict=True))
    ]
    first = Planned(writer.write(samples[0], _request_id(args.request_id_prefix, "warmup")), 0.0, samples[0].prompt_len)
    load = partial(run_load, client, streams=backend.streams, max_concurrency=args.max_concurrency)
    try:
        if args.ready_check_timeout_sec > 0:
            await _wait_ready(load, first, args.ready_check_timeout_sec)
        if args.num_warmups > 0:
            await load([first] * args.num_warmups)
        before = await fetch_counters(client, headers)
        with tqdm(total=len(plan), disable=args.disable_tqdm, unit="req") as bar:
            trace: RunTrace = await load(plan, on_done=bar.update)
        return trace, server_figures(before, await fetch_counters(client, headers), trace.seconds)
    finally:
        client.close()


def _request_id(prefix: str, number: str) -> str:
    """An id that begins with `prefix`; a UUID without one, since some servers take nothing else."""
    return f"{prefix}{number}" if prefix else str(uuid.uuid4())


async def _wait_ready(load: Callable[..., Any], first: Planned, seconds: float) -> None:
    """Repeat one request until it succeeds.

    Raises:
        RuntimeError: it did not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        trace: RunTrace = await load([first])
        [record] = trace.records
        if record.succeeded:
            return
        if time.monotonic() >= deadline:
            raise RuntimeError(f"the server was not ready within {seconds:g} s: {record.cause}: {record.error}")
        await asyncio.sleep(_SECONDS_BETWEEN_CHECKS)
