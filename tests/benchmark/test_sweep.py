"""`shardline bench sweep serve` with small commands in place of a server and a benchmark."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from shardline.benchmark.sweep import Combination, read_combinations
from shardline.cli.main import main

SERVER = """
import http.server, signal, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open(sys.argv[1], "a").write(" ".join(sys.argv[2:]) + "\\n")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
BENCH = """
import json, os, sys
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
open(words[0], "a").write(" ".join(words[1:3]) + "\\n")
if os.path.exists("fail"): sys.exit(3)
result = {"output_throughput": float(value("--rate")), "median_e2el_from_intended_ms": 5.0, "failures": {}}
json.dump(result, open(os.path.join(value("--result-dir"), value("--result-filename")), "w"))
"""


def test_flags_of_a_combination() -> None:
    combination = Combination({"max_num_seqs": 8, "enable-x": True, "y": False, "z": None, "config": {"a": 1}})
    command = "serve m --max-num-seqs 4 --keep 1 2 --no-enable-x --z=3"
    assert combination.apply(command.split()) == [
        *["serve", "m", "--keep", "1", "2", "--max-num-seqs", "8", "--enable-x", "--no-y", "--config"],
        '{"a": 1}',
    ]


@pytest.mark.slow
def test_sweep_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "bench.py").write_text(BENCH)
    (tmp_path / "serve.json").write_text('[{"max_num_seqs": 4}, {"max_num_seqs": 8}]')
    (tmp_path / "bench.json").write_text('{"slow": {"rate": 1}, "fast": {"rate": 2}}')
    words = ["bench", "sweep", "serve", "-o", "out", "-e", "first", "--num-runs", "2", "--html", "page.html"]
    words += ["--serve-cmd", f"{sys.executable} server.py served --port {free_port}"]
    words += ["--bench-cmd", f"{sys.executable} bench.py benched --rate 0"]
    words += ["--serve-params", "serve.json", "--bench-params", "bench.json"]
    (tmp_path / "fail").touch()
    assert main(words) == 1
    (tmp_path / "fail").unlink()
    assert main([*words, "--resume"]) == 0
    assert len((tmp_path / "served").read_text().splitlines()) == 3, "one that failed, then one of each"
    assert len((tmp_path / "benched").read_text().splitlines()) == 1 + 8
    with (tmp_path / "out" / "first" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["max_num_seqs"], r["output_throughput"], r["run_number"]) for r in rows][:3] == [
        ("4", "1.0", "0"),
        ("4", "1.0", "1"),
        ("4", "2.0", "0"),
    ]
    assert (tmp_path / "page.html").read_text().count("<circle") == 8
    # Nothing is left to run: no server starts.
    assert main([*words, "--resume"]) == 0
    assert len((tmp_path / "served").read_text().splitlines()) == 3
    assert main(words) == 2, "an experiment is not overwritten"


def test_links_choose_combinations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, key in (("serve", "max_num_seqs"), ("bench", "max-concurrency")):
        (tmp_path / f"{name}.json").write_text(json.dumps([{key: 4}, {key: 8}]))
    words = ["bench", "sweep", "serve", "--dry-run", "-o", str(tmp_path), "--num-runs", "1", "--serve-cmd", "serve"]
    words += ["--bench-cmd", "load", "--link-vars", "max_num_seqs=max_concurrency"]
    words += ["--serve-params", str(tmp_path / "serve.json"), "--bench-params", str(tmp_path / "bench.json")]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" --percentile")[0] for line in lines] == [
        "server: serve --max-num-seqs 4",
        "benchmark: load --max-concurrency 4",
        "server: serve --max-num-seqs 8",
        "benchmark: load --max-concurrency 8",
    ]


@pytest.mark.parametrize("flag", ["--serve-cmd", "--bench-cmd"])
@pytest.mark.parametrize(("command", "message"), [("", "must be a command, got ''"), ("a 'b", "No closing quotation")])
def test_bad_commands(
    tmp_path: Path, flag: str, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"--serve-cmd": "serve", "--bench-cmd": "load", flag: command}
    assert (
        main(["bench", "sweep", "serve", "-o", str(tmp_path), *(word for pair in words.items() for word in pair)]) == 2
    )
    [line] = capsys.readouterr().err.splitlines()
    assert flag in line
    assert message in line


@pytest.mark.parametrize("text", ["{", "[]", "[1]", '{"a": 1}', '[{"x": 1}, {"x": 1}]'])
def test_bad_combinations(tmp_path: Path, text: str) -> None:
    path = tmp_path / "params.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"params\.json"):
        read_combinations(str(path))
