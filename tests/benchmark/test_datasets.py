"""Workloads and arrivals."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest

from shardline.benchmark.datasets import find_dataset
from shardline.benchmark.load import Ramp, arrival_times
from shardline.benchmark.noise import half_width
from shardline.benchmark.workload import Sample
from shardline.checkpoints.hub import resolve_tokenizer
from shardline.cli.commands.bench.serve import prepare
from shardline.cli.main import build_parser
from shardline.text.tokenizer import Tokenizer

FOLDER = resolve_tokenizer("demo")
DEMO = Tokenizer.from_folder(FOLDER)


def options(words: str) -> argparse.Namespace:
    args = build_parser().parse_args(["bench", "serve", *words.split()])
    prepare(args)
    args.tokenizer_folder = FOLDER
    return args


def load(words: str) -> list[Sample]:
    args = options(words)
    return find_dataset(args.dataset_name).load_samples(args, DEMO)


def encode(sample: Sample) -> list[int]:
    assert DEMO is not None
    assert isinstance(sample.prompt, str)
    return DEMO.encode_text(sample.prompt, add_special_tokens=False)


def test_random_lengths_and_prefix() -> None:
    samples = load(
        "--num-prompts 50 --random-input-len 40 --random-output-len 20 --random-prefix-len 8 "
        '--random-range-ratio {"input":0.5,"output":0.25}'
    )
    assert len(samples) == 50
    lengths = [len(encode(sample)) for sample in samples]
    assert lengths == [sample.prompt_len for sample in samples]
    assert 8 + 19 <= min(lengths) < max(lengths) <= 8 + 60
    assert 15 <= min(s.output_len for s in samples) < max(s.output_len for s in samples) <= 25
    assert len({str(sample.prompt)[:20] for sample in samples}) < 5, "all prompts begin with the prefix"
    assert samples == load(
        "--num-prompts 50 --random-input-len 40 --random-output-len 20 --random-prefix-len 8 "
        '--random-range-ratio {"input":0.5,"output":0.25}'
    )


def test_random_prompts_share_no_prefix() -> None:
    samples = load("--num-prompts 100 --random-input-len 16")
    assert len({tuple(encode(sample)[:4]) for sample in samples}) > 90


def test_prefix_repetition() -> None:
    samples = load(
        "--dataset-name prefix_repetition --num-prompts 21 --prefix-repetition-num-prefixes 4 "
        "--prefix-repetition-prefix-len 32 --prefix-repetition-suffix-len 16 --prefix-repetition-output-len 3"
    )
    assert len(samples) == 20
    assert {sample.output_len for sample in samples} == {3}
    # Tokens may merge where prefix and suffix meet, and a few random ones always do.
    assert all(abs(len(encode(sample)) - 48) <= 4 for sample in samples)
    assert len({str(sample.prompt)[:40] for sample in samples}) == 4


def test_custom(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "output_tokens": 3}\n\n{"prompt": "Bye", "output_tokens": 5}\n')
    base = f"--dataset-name custom --dataset-path {path} --skip-chat-template"
    assert [(s.prompt, s.output_len) for s in load(f"{base} --num-prompts 2 --disable-shuffle")] == [
        ("Hello", 256),
        ("Bye", 256),
    ]
    assert sorted(s.output_len for s in load(f"{base} --num-prompts 0 --custom-output-len -1")) == [3, 5]
    assert len(load(f"{base} --num-prompts 9")) == 9
    assert len(load(f"{base} --num-prompts 9 --no-oversample")) == 2
    [chat] = load(f"--dataset-name custom --dataset-path {path} --num-prompts 1 --disable-shuffle")
    assert isinstance(chat.prompt, str)
    assert "Hello" in chat.prompt
    assert len(chat.prompt) > len("Hello"), "the chat template is applied"


def test_sharegpt_leaves_out_what_vllm_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"

    def talk(*texts: str) -> dict[str, object]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    long = "many words are here " * 600
    path.write_text(
        json.dumps([talk("a long enough prompt for this", "and an answer of some tokens"), talk("no answer to this"),
                    talk("x", "too short a prompt, this one"), talk(long, "too long a prompt"), {"id": 1}])
    )  # fmt: skip
    samples = load(f"--dataset-name sharegpt --dataset-path {path} --num-prompts 5 --no-oversample")
    assert [sample.prompt for sample in samples] == ["a long enough prompt for this"]


def test_timed_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 5000, "input_length": 40, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 5500, "input_length": 48, "output_length": 6, "hash_ids": [1, 2, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = load(f"--dataset-name timed_trace --dataset-path {path} --timed-trace-sec-multiplier 0.001")
    assert (first.timestamp, second.timestamp) == (0.0, 0.5)
    assert isinstance(first.prompt, list)
    assert isinstance(second.prompt, list)
    assert (len(first.prompt), len(second.prompt), second.output_len) == (40, 48, 6)
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:] != second.prompt[32:40]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ("custom", '{"prompt": "a"}\n[1]', "line 2: not a JSON object"),
        ("custom", '{"text": "a"}', "line 1: the object needs a text 'prompt'"),
        ("custom", "\n", "has no prompts"),
        ("sharegpt", "{", "is not JSON"),
        ("timed_trace", '{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 1: 'input_length' must be"),
        ("timed_trace", '{"timestamp": "x", "input_length": 4, "output_length": 1}', "line 1: 'timestamp' must be"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(f"--dataset-name {name} --dataset-path {path}")


def test_missing_file() -> None:
    with pytest.raises(ValueError, match="No such file"):
        load("--dataset-name custom --dataset-path /nowhere.jsonl")


def test_arrivals() -> None:
    rng = np.random.default_rng(0)
    assert arrival_times(3, math.inf, rng) == [0.0] * 3
    assert arrival_times(4, 10, rng, burstiness=math.inf) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    for burstiness, spread in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        gaps = np.diff(arrival_times(4000, 50, rng, burstiness=burstiness), prepend=0.0)
        assert gaps.sum() == pytest.approx(80)
        assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.15)


def test_ramps() -> None:
    rng = np.random.default_rng(0)
    for strategy, middle in (("linear", 55), ("exponential", math.sqrt(1000))):
        times = arrival_times(101, math.inf, rng, burstiness=math.inf, ramp=Ramp(strategy, 10, 100))
        gaps = np.diff(times)
        assert 1 / gaps[-1] == pytest.approx(100)
        assert 1 / gaps[49] == pytest.approx(middle, rel=0.02)
    assert arrival_times(2, math.inf, rng, ramp=Ramp("linear", 0, 10))[0] == 0.0


def test_half_width_is_students() -> None:
    assert half_width([1.0]) is None
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
