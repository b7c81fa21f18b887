"""A download from a hub of our own: the few calls of the hub's protocol that huggingface_hub makes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.runtime.loader.gguf_writer import write_gguf

pytestmark = pytest.mark.slow  # downloads are processes, which import the hub's library
_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_DOWNLOAD = "import sys; from shardline.cli.main import main; sys.exit(main())"
_RESOLVE = """
import sys
from shardline.checkpoints.hub import resolve_model
try:
    files = resolve_model(sys.argv[1], weights="no-weights" not in sys.argv)
    print(files.folder, sorted(path.name for path in files.folder.iterdir()))
except ValueError as error:
    print("ValueError", error)
"""


class Hub(ThreadingHTTPServer):
    """Serves one repository, "team/model", out of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.downloaded: list[str] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        files = [path for path in self.server.folder.rglob("*") if path.is_file()]
        if path.startswith("/api/models/team/model/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": str(file.relative_to(self.server.folder)),
                    "size": file.stat().st_size,
                    "oid": "0",
                }
                for file in files
            ]
            self._answer(json.dumps(tree).encode())
        elif path.startswith("/api/models/team/model"):
            siblings = [{"rfilename": str(file.relative_to(self.server.folder))} for file in files]
            info = {"id": "team/model", "sha": _COMMIT, "tags": [], "siblings": siblings}
            self._answer(json.dumps(info).encode())
        elif path.startswith("/team/model/resolve/"):
            name = path.split("/", 5)[5]
            if self.command == "GET":
                self.server.downloaded.append(name)
                if name.endswith(".safetensors"):
                    self.server.begun.set()
                    self.server.may_go_on.wait(20.0)
            self._answer((self.server.folder / name).read_bytes())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = make_checkpoint("llama", tmp_path / "repository", max_shard_size="200KB")
    for extra in ("consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors", "README.md"):
        (folder / extra).parent.mkdir(exist_ok=True)
        (folder / extra).write_text("not for us")
    (folder / "tokenizer.json").write_text("{}")
    with Hub(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _resolve(hub: Hub, home: Path, *arguments: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", _RESOLVE, *arguments],
        env={
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def _start_download(port: int, home: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", _DOWNLOAD, "download", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def test_only_what_is_needed_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    _resolve(hub, home, "team/model", "no-weights")
    configs = {"config.json", "generation_config.json", "tokenizer.json"}
    assert set(hub.downloaded) == configs
    _resolve(hub, home, "team/model")
    weights = {path.name for path in hub.folder.glob("model*")}
    assert len(weights) > 2
    assert sorted(hub.downloaded) == sorted(configs | weights)

    _resolve(hub, home, "team/model")
    assert len(hub.downloaded) == len(configs | weights)
    offline = _resolve(hub, home, "team/model", HF_HUB_OFFLINE="1")
    assert _COMMIT in offline
    assert all(name in offline for name in configs | weights)


def test_one_quant_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    for file in hub.folder.glob("model*"):
        file.unlink()
    for name in ("m-Q4_0", "m-Q8_0", "Q8_1/m-Q8_1-00001-of-00002", "Q8_1/m-Q8_1-00002-of-00002"):
        file = hub.folder / f"{name}.gguf"
        file.parent.mkdir(exist_ok=True)
        write_gguf(make_checkpoint("llama", tmp_path / "m"), file)
    home = tmp_path / "home"
    assert "several quants: Q4_0, Q8_0, Q8_1; name one" in _resolve(hub, home, "team/model")
    hub.downloaded.clear()
    assert "m-Q8_0.gguf" in _resolve(hub, home, "team/model:q8_0")
    assert [name for name in hub.downloaded if name.endswith(".gguf")] == ["m-Q8_0.gguf"]
    assert "has no quant Q4_0; it has Q8_0" in _resolve(hub, home, "team/model:Q4_0", HF_HUB_OFFLINE="1")
    # Both parts are fetched; here they are copies of one file.
    assert "m-Q8_1-00002-of-00002.gguf and in m-Q8_1-00001-of-00002" in _resolve(hub, home, "team/model:Q8_1")


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    answer = _resolve(hub, tmp_path / "home", "team/other")
    assert answer.startswith(
        "ValueError model 'team/other': there is no such folder, and the hub has none of that name"
    )


def test_two_downloads_of_one_folder_fetch_a_model_once(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    hub.may_go_on.clear()
    first = _start_download(hub.server_port, home, "team/model", "--revision", "main")
    assert hub.begun.wait(20.0)
    second = _start_download(hub.server_port, home, "team/model")
    time.sleep(2.0)  # the second one comes to the lock of the first file
    hub.may_go_on.set()
    for process in (first, second):
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert Path(output.splitlines()[-1]) == home / "hub/models--team--model/snapshots" / _COMMIT
    weights = [name for name in hub.downloaded if name.endswith(".safetensors")]
    assert len(weights) == len(set(weights)) > 1


def test_a_download_that_cannot_be_is_told_in_one_line(hub: Hub, tmp_path: Path) -> None:
    absent = _start_download(hub.server_port, tmp_path, "team/other")
    unreachable = _start_download(1, tmp_path, "team/model")
    for process, code, words in ((absent, 2, "the hub has none of that name"), (unreachable, 1, "cannot be reached")):
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output, errors.count("\n")) == (code, "", 1)
        assert words in errors
