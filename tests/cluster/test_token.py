"""The join token: where it is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.cluster.wire import find_token
from shardline.config.cluster import ClusterConfig

HEAD = ClusterConfig(nnodes=2, master_addr="10.0.0.1")
NODE = ClusterConfig(nnodes=2, master_addr="10.0.0.1", node_rank=1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SHARDLINE_JOIN_TOKEN", raising=False)
    return tmp_path


def test_the_head_writes_a_token_that_only_its_user_reads(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"no join token; copy .*join-token of the head"):
        find_token(NODE)
    token = find_token(HEAD)
    file = home / ".config" / "shardline" / "join-token"
    assert f"scp -p {file} NODE:.config/shardline/" in caplog.text
    assert token not in caplog.text
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_token(NODE) == find_token(HEAD) == token
    assert len(token) > 40


def test_a_file_comes_before_the_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_JOIN_TOKEN", "from-the-environment-123")
    assert find_token(NODE) == "from-the-environment-123"
    (home / "token").write_text("from-a-file-of-the-user\n")
    named = ClusterConfig(nnodes=2, master_addr="10.0.0.1", join_token_file=str(home / "token"))
    assert find_token(named) == "from-a-file-of-the-user"
    monkeypatch.setenv("SHARDLINE_JOIN_TOKEN", "short")
    with pytest.raises(ValueError, match="SHARDLINE_JOIN_TOKEN has 5 characters and needs 22"):
        find_token(NODE)
