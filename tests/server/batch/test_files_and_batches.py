"""/v1/files and /v1/batches through the server and the official client."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.openai.batch.jobs import PRIORITY
from shardline.server.openai.batch.store import BatchStore
from tests.server.conftest import Running, serve, wait_until


def config(folder: Path, **options: Any) -> ServerConfig:
    return ServerConfig(port=0, batch_dir=str(folder), **options)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serve(config(tmp_path_factory.mktemp("batches") / "new")) as running:
        yield running


def request(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {"prompt": f"p{number}", **body}}


def text_of(entries: list[Any]) -> bytes:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    return "\n".join(lines).encode()


def upload(client: openai.OpenAI, entries: list[Any]) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(text_of(entries))), purpose="batch").id


def start(client: openai.OpenAI, file_id: str, **options: Any) -> str:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", **options
    ).id


def wait_ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    ended = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: client.batches.retrieve(batch_id).status in ended, 60)
    return client.batches.retrieve(batch_id)


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_end_to_end(shared: Running, client: openai.OpenAI) -> None:
    broken = '{"custom_id": "broken", "method'
    entries = [request(1), request(2, model="other"), broken, request(3, url="/v1/embeddings"), request(4)]
    file_id = upload(client, entries)
    batch_id = start(client, file_id, metadata={"of": "tests"})
    batch = wait_ended(client, batch_id)
    assert batch.status == "completed"
    assert batch.metadata == {"of": "tests"}
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 2, 3)
    good = content(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in good] == ["r1", "r4"]
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in good)
    assert good[0]["response"]["body"]["choices"][0]["text"].startswith("Hello, w")
    wrong = {answer["custom_id"]: answer for answer in content(client, batch.error_file_id)}
    assert wrong["r2"]["response"]["status_code"] == 404
    assert wrong["r2"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert wrong["broken"]["response"] is None
    assert "not JSON" in wrong["broken"]["error"]["message"]
    assert "Supported endpoints: /v1/completions" in wrong["r3"]["response"]["body"]["error"]["message"]
    assert {entry.priority for entry in shared.engine.requests[-2:]} == {PRIORITY}
    assert {entry.owner for entry in shared.engine.requests[-2:]} == {batch.id}
    with pytest.raises(openai.ConflictError, match="status 'completed'"):
        client.batches.cancel(batch_id)


def test_files(client: openai.OpenAI) -> None:
    text = b"\r\n--x\n" * 50_000
    made = client.files.create(file=("../dir/é x.jsonl", io.BytesIO(text)), purpose="batch")
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(text), "é x.jsonl", "batch", "file")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == text
    other = upload(client, [request(1)])
    assert [file.id for file in client.files.list(limit=1)][:2] == [other, made.id]
    assert client.files.list(order="asc", after=made.id).data[0].id == other
    assert client.files.delete(made.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="No such File"):
            call(made.id)


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    file_id = upload(client, [request(1)])
    ids = [start(client, file_id) for _ in range(3)]
    for batch_id in ids:
        wait_ended(client, batch_id)
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:0:-1]
    assert page.has_more
    assert client.batches.list(after=ids[1], limit=1).data[0].id == ids[0]


def test_an_empty_file_fails(client: openai.OpenAI) -> None:
    batch = wait_ended(client, start(client, upload(client, ["", " "])))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "empty_file"


def test_ids_that_are_not_unique_fail(client: openai.OpenAI) -> None:
    batch = wait_ended(client, start(client, upload(client, [request(1), request(2), request(1)])))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.code, error.line) == ("duplicate_custom_id", 3)
    assert error.message == "each custom_id must be unique: 'r1' is in lines 1, 3"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"endpoint": "/v1/files"}, 400),
        ({"endpoint": "/v1/chat/completions/batch"}, 400),
        ({"input_file_id": "../lock"}, 404),
        ({"metadata": {"a": 1}}, 400),
        ({"unknown": 1}, 400),
        ({"completion_window": None}, 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400),
    ],
)
def test_bad_batches(http: httpx.Client, client: openai.OpenAI, body: dict[str, Any], status: int) -> None:
    good = {"input_file_id": upload(client, [request(1)]), "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = http.post("/v1/batches", json={**good, **body})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/files?limit=0", 400),
        ("/v1/files?limit=x", 400),
        ("/v1/files?order=up", 400),
        ("/v1/files?after=file-no", 400),
        ("/v1/batches?limit=101", 400),
        ("/v1/batches/batch_no", 404),
        ("/v1/files/..%2Flock/content", 404),
    ],
)
def test_bad_queries(http: httpx.Client, path: str, status: int) -> None:
    assert http.get(path).status_code == status


PART = 'Content-Disposition: form-data; name="{}"'
FILE = PART.format("file") + '; filename="a.jsonl"'


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(FILE, "x")], "'purpose'"),
        ([(FILE, "x"), (PART.format("purpose"), "fine-tune")], "must be 'batch'"),
        ([(PART.format("purpose"), "batch")], "'file'"),
        ([(PART.format("file"), "x"), (PART.format("purpose"), "batch")], "one file"),
        ([(FILE, "x"), (FILE, "x")], "one file"),
        ([(PART.format("purpose"), "b" * 70_000)], "more than 65536 bytes"),
        ([(f"X: {'y' * 20_000}", "x")], "more than 16384 bytes"),
        ([("X: y", "x")], "no name"),
        ([(PART.format(f"f{number}"), "x") for number in range(40)], "more than 32 parts"),
        (
            [(FILE, "x"), (PART.format("purpose"), "batch"), (PART.format("expires_after[seconds]"), "1")],
            "expires_after",
        ),
    ],
)
def test_bad_uploads_leave_nothing(
    http: httpx.Client, client: openai.OpenAI, parts: list[tuple[str, str]], message: str
) -> None:
    before = [file.id for file in client.files.list()]
    form = "".join(f"--b\r\n{headers}\r\n\r\n{text}\r\n" for headers, text in parts) + "--b--\r\n"
    answer = http.post("/v1/files", content=form, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert [file.id for file in client.files.list()] == before


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", "{}"),
        ("multipart/form-data", "--b--"),
        ("multipart/form-data; boundary=b", "--b\r\n" + FILE),
        ("multipart/form-data; boundary=b", "--b\r\n" + FILE + "\r\n\r\nx"),
        ("multipart/form-data; boundary=b", ""),
    ],
)
def test_bodies_that_are_no_forms(http: httpx.Client, kind: str, body: str) -> None:
    answer = http.post("/v1/files", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400
    assert "form" in answer.json()["error"]["message"]


def test_a_form_in_small_pieces(shared: Running) -> None:
    form = f"--bb\r\n{FILE}\r\n\r\n--b\r\n--b\r\n--bb\r\n{PART.format('purpose')}\r\n\r\nbatch\r\n--bb--\r\n".encode()
    head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Type: multipart/form-data; boundary=bb\r\nContent-Length: %d\r\n\r\n" % len(form)
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        for byte in form:
            connection.sendall(bytes([byte]))
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"bytes":8,' in answer


@pytest.mark.slow
def test_cancel_keeps_the_answers_so_far(tmp_path: Path) -> None:
    with serve(config(tmp_path)) as running, running.openai() as client:
        file_id = upload(client, [request(1), request(2, ignore_eos=True, max_tokens=400)])
        running.engine.seconds_per_token = 0.005
        batch_id = start(client, file_id)
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 1, 60)  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            client.files.delete(file_id)
        assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
        batch = wait_ended(client, batch_id)
        assert batch.status == "cancelled"
        assert [answer["custom_id"] for answer in content(client, batch.output_file_id)] == ["r1"]
        wait_until(lambda: running.engine.num_running() == 0)


@pytest.mark.slow
def test_batches_go_on_when_the_server_starts_again(tmp_path: Path) -> None:
    entries = [request(1), *(request(number, ignore_eos=True, max_tokens=40) for number in range(2, 6))]
    with serve(config(tmp_path)) as running, running.openai() as client:
        running.engine.seconds_per_token = 0.1
        batch_id = start(client, upload(client, entries))
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 1, 60)  # type: ignore[union-attr]
    with serve(config(tmp_path)) as running, running.openai() as client:
        batch = wait_ended(client, batch_id)
        assert batch.status == "completed"
        answers = content(client, batch.output_file_id)
        assert [answer["custom_id"] for answer in answers] == [entry["custom_id"] for entry in entries]
        assert len(running.engine.requests) == 4, "the first one had its answer"


@pytest.mark.slow
def test_the_folder_is_bounded_and_belongs_to_one_server(tmp_path: Path) -> None:
    with serve(config(tmp_path, batch_dir_bytes=2000)) as running, running.openai() as client:
        with pytest.raises(openai.APIStatusError, match="--batch-dir-bytes") as caught:
            client.files.create(file=("in", b"x" * 3000), purpose="batch")
        assert caught.value.status_code == 413
        file_id = upload(client, [request(number) for number in range(10)])
        batch = wait_ended(client, start(client, file_id))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "storage_full"
        assert len(content(client, batch.output_file_id)) < 10, "the answers so far are there"
        assert sum(path.stat().st_size for path in (tmp_path / "files").glob("file-*") if not path.suffix) <= 2000
        client.files.delete(file_id)
        upload(client, [request(1)])
        with pytest.raises(ValueError, match="another server uses it"):
            BatchStore(tmp_path, 1)


@pytest.mark.slow
def test_an_upload_may_be_larger_than_a_body(tmp_path: Path) -> None:
    with serve(config(tmp_path, max_request_bytes=1000)) as running, running.openai() as client:
        entries = [request(1), request(2, user="x" * 2000), request(3)]
        batch = wait_ended(client, start(client, upload(client, entries)))
        assert [answer["custom_id"] for answer in content(client, batch.output_file_id)] == ["r1", "r3"]
        [error] = content(client, batch.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("r2", "invalid_batch_line")


@pytest.mark.slow
def test_keys_are_asked_of_clients_and_not_of_batches(tmp_path: Path) -> None:
    with serve(config(tmp_path, api_key=("secret",))) as running:
        with running.openai() as stranger, pytest.raises(openai.AuthenticationError):
            stranger.files.list()
        with running.openai("secret") as client:
            batch = wait_ended(client, start(client, upload(client, [request(1)])))
            assert batch.status == "completed"
            assert batch.error_file_id is None


def test_without_a_folder_the_answer_says_how(tmp_path: Path) -> None:
    with serve() as running, running.openai() as client:
        for call in (client.files.list, client.batches.list, lambda: client.batches.retrieve("batch_1")):
            with pytest.raises(openai.NotFoundError, match="--batch-dir"):
                call()


@pytest.mark.slow
def test_embeddings_in_a_batch(tmp_path: Path) -> None:
    engine = EngineConfig.from_options(runner="pooling")
    with serve(config(tmp_path), engine_config=engine) as running, running.openai() as client:
        entry = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}
        batch = client.batches.create(
            input_file_id=upload(client, [entry]), endpoint="/v1/embeddings", completion_window="24h"
        )
        [answer] = content(client, wait_ended(client, batch.id).output_file_id)
        assert len(answer["response"]["body"]["data"][0]["embedding"]) == 3
