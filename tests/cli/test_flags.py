"""Flags are the configuration's fields with vLLM's names; a mistake gives one line and exit code 2."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from typing import Any

import pytest

from shardline.cli.flags import engine_config, fields_from_flags
from shardline.cli.main import build_parser, main
from shardline.config.engine import EngineConfig, option_names
from shardline.config.parallel import ParallelConfig
from shardline.config.server import ServerConfig

COMMANDS = (["serve"], ["chat"], ["bench", "throughput"], ["bench", "latency"])


def config_of(words: str) -> EngineConfig:
    return engine_config(build_parser().parse_args(["serve", *words.split()]))


def test_no_flags_are_the_defaults() -> None:
    assert config_of("") == EngineConfig()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("org/model", {"model": "org/model"}),
        ("--model org/model", {"model": "org/model"}),
        ("m --tensor-parallel-size 4", {"model": "m", "tensor_parallel_size": 4}),
        ("-tp 2 -pp 3 -dp 4 -cp 1", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}),
        ("--tensor_parallel_size=2", {"tensor_parallel_size": 2}),
        ("--max-model-len auto", {"max_model_len": "auto"}),
        ("--max-model-len 4096", {"max_model_len": 4096}),
        ("--max-num-seqs 8 --max-num-batched-tokens 64", {"max_num_seqs": 8, "max_num_batched_tokens": 64}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-prefix-caching --enable-chunked-prefill m", {"model": "m"}),
        ("--gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--quantization int8", {"quantization": "int8"}),
        ("--dtype bfloat16 --load-format dummy --seed 3", {"dtype": "bfloat16", "load_format": "dummy", "seed": 3}),
        ("--revision v1 --tokenizer some_folder", {"revision": "v1", "tokenizer": "some_folder"}),
        ("--block-size 32 --kv-cache-memory 4GiB", {"block_size": 32, "kv_cache_memory": "4GiB"}),
        ("--pipeline-stages 10,12,10", {"pipeline_stages": "10,12,10"}),
    ],
)
def test_flags_that_vllm_users_type(words: str, options: dict[str, Any]) -> None:
    assert config_of(words) == EngineConfig.from_options(**options)


def test_server_flags() -> None:
    words = "serve m --host 0.0.0.0 --port 9000 --api-key a b --served-model-name x --disable-log-requests"
    args = build_parser().parse_args(words.split())
    assert fields_from_flags(args, ServerConfig) == {
        "host": "0.0.0.0",
        "port": 9000,
        "api_key": ("a", "b"),
        "served_model_name": ("x",),
        "disable_log_requests": True,
    }
    assert ServerConfig(**fields_from_flags(args, ServerConfig)).port == 9000


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_a_flag_of_every_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([*command, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for name in option_names():
        assert "--" + name.replace("_", "-") in text
    for field in dataclasses.fields(ParallelConfig):
        for alias in field.metadata["aliases"]:
            assert f" {'-' if len(alias) <= 3 else '--'}{alias}" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("serve --tensor-paralel-size 2", "unknown option --tensor-paralel-size; did you mean --tensor-parallel-size"),
        ("serve --tensor-parallel 2", "did you mean --tensor-parallel-size"),
        ("bench throughput --num-promts=3", "did you mean --num-prompts"),
        ("serve --nnodes 2", "several nodes need --master-addr"),
        ("serve --node_rank=1", "node_rank must be from 0 to nnodes - 1 = 0, got 1"),
        ("serve --headless", "a headless node needs its head"),
        ("serve -dp 2 -dpa 10.0.0.1 --headless", "needs --data-parallel-size-local and --data-parallel-start-rank"),
        ("serve -dp 2 -dpa 10.0.0.1 -dpl 3", "this node's replicas 0 to 2 are not all among the 2"),
        ("serve -dp 2 -dpa 10.0.0.1 -dpl 1 -dpr 2 --headless", "this node's replicas 2 to 2 are not all among the 2"),
        ("serve -dp 2 -dpl 1", "needs data_parallel_address"),
        ("serve -n 2 --master-addr a -dpa b", "with data_parallel_address leave nnodes out"),
        ("serve --data-parallel-hybrid-lb", "is not supported yet: one head serves all replicas"),
        ("serve --lora-modules a=b", "lora_modules needs enable_lora"),
        ("serve --lora-target-modules q_proj", "lora_target_modules needs enable_lora"),
        ("serve --enable-lora --lora-modules b", "lora_modules must be name=folder, got 'b'"),
        ("serve --enable-lora --lora-modules a=b a=c", "lora_modules names 'a' twice"),
        ('serve --enable-lora --lora-modules {"name":1}', "lora_modules must be name=folder, or JSON with name, path"),
        ("serve --enable-lora --max-lora-rank 1024", "max_lora_rank must be at most 512, got 1024"),
        ("serve --enable-lora --max-loras 0", "max_loras must be at least 1, got 0"),
        ("serve --enable-lora --lora-dtype float32", "--lora-dtype float32 is not supported"),
        ("serve --enable-sleep-mode", "a server cannot sleep"),
        ("serve --max-logprobs -2", "max_logprobs must be at least 0, or -1 for all"),
        ("serve --cpu-offload-gb 4", "cpu_offload_gb needs offload_to on a CPU"),
        ("serve --speculative-config {}", 'must be "ngram", "suffix", "draft_model", "eagle", "eagle3" or "mtp"'),
        ("serve --kv-events-config on", "kv_events_config must be a JSON object like"),
        ('serve --kv-events-config {"topics":1}', "kv_events_config has the unknown key 'topics'"),
        ('serve --kv-events-config {"endpoint":"http://a"}', "endpoint of kv_events_config must be like tcp://"),
        ("serve -sc ngram", "speculative_config must be a JSON object like"),
        ("serve --spec-method", "--spec-method needs a value"),
        ("serve --spec-method guess", "speculative_config"),
        ("serve --nnode 2", "unknown option --nnode; did you mean --nnodes?"),
        ("serve --max-model 2", "unknown option --max-model"),
        ("serve --mode x", "did you mean --model?"),
        ("serve a b", "unexpected argument 'b'"),
        ("serve --tensor-parallel-size two", "invalid int value: 'two'"),
        ("serve --dtype int3", "invalid choice: 'int3'"),
        ("serve --hf-overrides 3", "hf_overrides must be a JSON object, got '3'"),
        ("serve --override-generation-config x", "override_generation_config must be a JSON object"),
        ("serve --ssl-cert-reqs 2", "ssl_cert_reqs asks clients for certificates, which needs ssl_ca_certs"),
        ("serve --enable-lora --lora-modules a=x demo=y", "lora_modules: 'demo' is the name of the served model"),
        ("serve --middleware a.b", "--middleware a.b: cannot be imported"),
        ("serv", "invalid choice: 'serv'"),
        ("launch demo", "there is no command launch: it needs the word render"),
        ("launch render demo --tokens-only", "render_only needs the tokenizer that tokens_only leaves out"),
        ("collect-env", "there is no command collect-env: `shardline doctor`"),
        ("--prt 1", "unknown option --prt; did you mean --port"),
        ("some/model --port 70000", "port must be in [0, 65535]"),
        ("", "required: COMMAND"),
        ("bench", "required: BENCHMARK"),
        ("bench latency --batch-size 0", "must be at least 1, got 0"),
        ("serve --tensor-parallel-size 0", "tensor_parallel_size must be at least 1, got 0"),
        ("serve --gpu-memory-utilization 1.5", "gpu_memory_utilization must be in (0, 1]"),
        ("serve --port 70000", "port must be in [0, 65535]"),
        ("chat --url localhost:8000", "URL must look like http://127.0.0.1:8000, got 'localhost:8000'"),
        ("chat --url http://127.0.0.1:99999", "URL 'http://127.0.0.1:99999' is none: Port out of range"),
        ("router status --url http://127.0.0.1:99999", "is none: Port out of range"),
        ("chat --temperature -1", "temperature must be in [0, 100]"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words.split())
    except SystemExit as exit:
        code = int(exit.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("shardline: error: ")
    assert captured.err.count("\n") == 1
    assert error in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("engine died"), 1), (OSError("disk full"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes_of_failures(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*args: Any) -> int:
        raise error

    monkeypatch.setattr("shardline.cli.commands.serve.engine_config", failing)
    assert main(["serve"]) == code
    assert capsys.readouterr().err == (f"shardline: error: {error}\n" if code == 1 else "")


def test_flags_are_never_abbreviated() -> None:
    """`--tensor` must not quietly become `--tensor-parallel-size`."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--tensor", "2"])
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "latency", "--batch", "2"])


def test_a_flag_of_vllm_without_effect_here_is_accepted() -> None:
    args = build_parser().parse_args(["serve", "--disable-nccl-for-dp-synchronization", "-dp", "2"])
    assert engine_config(args).parallel.disable_nccl_for_dp_synchronization
    assert not engine_config(build_parser().parse_args(["serve"])).parallel.disable_nccl_for_dp_synchronization


def test_version_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for word in ("shardline 0.", "python 3.", "torch 2.", "device: CPU"):
        assert word in text


def test_help_is_instant_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from shardline.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'fastapi', 'rich', 'msgspec'} & set(sys.modules)\n"
        "print(time.process_time() - start, sorted(heavy))"
    )
    times = []
    for _ in range(3):  # the best of three, in CPU time: the machine may be busy
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, _, heavy = done.stdout.strip().partition(" ")
        assert heavy == "[]"
        times.append(float(seconds))
        if times[-1] < 0.15:
            return
        time.sleep(0.5)
    assert min(times) < 0.15


@pytest.mark.parametrize("length", [3, 300_000])
def test_output_that_nobody_reads_is_no_error(length: int) -> None:
    code = (
        "import argparse, sys, time\n"
        "from shardline.cli import main\n"
        "run = argparse.Namespace(run=lambda args: (time.sleep(0.2), print('x' * int(sys.argv[1]))) and None)\n"
        "main.build_parser = lambda: argparse.Namespace(parse_args=lambda words: run)\n"
        "sys.exit(main.main([]))"
    )
    words = [sys.executable, "-c", code, str(length)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("words", ["serve --help", "serve --dtype int3"])
def test_types_that_do_not_work_are_not_offered(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    shown = "".join(capsys.readouterr())
    assert "bfloat16" in shown
    assert "'float16'" not in shown
    assert ",float16" not in shown
    assert "half" not in shown.partition("--dtype")[2].partition("--max-model-len")[0]


def test_a_container_listens_where_its_variable_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLINE_HOST", "no.such.host.invalid")
    assert main(["--port", "0"]) == 2
    assert "--host no.such.host.invalid: there is no such address" in capsys.readouterr().err
