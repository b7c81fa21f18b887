"""`shardline verify`, and `LLM.verify` with a real engine."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from shardline import lifeline
from shardline.api.adapters import LoRARequest
from shardline.api.llm import LLM
from shardline.cli.main import main
from shardline.receipts.receipt import Receipt, TokenConstraints
from shardline.sampling_params import SamplingParams, StructuredOutputsParams
from tests.forks import ForkServer
from tests.models.adapters import make_adapter
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def llm(fork_server: ForkServer) -> Iterator[LLM]:
    with patch.object(lifeline, "start_process", fork_server.start_process), LLM("demo", cpu_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def made(llm: LLM) -> list[Receipt]:
    """Of answers of every kind."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "n": 2, "ignore_eos": True},
        {"temperature": 0.0, "stop": ["e"]},
        {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=schema)},
        {"temperature": 1.0, "bad_words": ["the"], "repetition_penalty": 1.2, "min_tokens": 20},
    ]
    params = [SamplingParams(max_tokens=40, receipt=True, **kind) for kind in kinds]
    outputs = llm.generate(["Hello, how are you", "What is", "Say", "Tell me"], params, use_tqdm=False)
    receipts = [choice.receipt for output in outputs for choice in output.outputs]
    return [receipt for receipt in receipts if receipt is not None]


def test_answers_of_every_kind_are_verified(llm: LLM, made: list[Receipt]) -> None:
    assert len(made) == 5
    assert {len(receipt.output_token_ids) for receipt in made[:2]} == {40}
    verdicts = llm.verify(made)
    assert [str(verdict) for verdict in verdicts if not verdict.equal] == []
    assert [verdict.digest for verdict in verdicts] == [receipt.digest for receipt in made]


def test_the_exit_code_says_whether_they_are_equal(
    llm: LLM, made: list[Receipt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LLM, "from_config", lambda _: contextlib.nullcontext(llm))
    file = tmp_path / "receipt.json"
    file.write_bytes(msgspec.json.encode({"choices": [{"receipt": receipt} for receipt in made[:2]]}))
    assert main(["verify", str(file), "--model", "demo"]) == 0
    assert capsys.readouterr().out.count("equal: all 40 tokens") == 2
    wrong = msgspec.json.decode(msgspec.json.encode(made[0]))
    wrong["output_token_ids"][7] ^= 1
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(wrong).encode())))
    assert main(["verify", "-", "demo", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["position"], told["own_token_id"]) == (False, 7, made[0].output_token_ids[7])
    wrong["contract"]["kv_dtype"] = "int8"
    wrong["contract_sha256"] = msgspec.convert(wrong["contract"], type(made[0].contract)).sha256
    right = msgspec.to_builtins(made[1], str_keys=True)
    file.write_text(json.dumps([wrong, right]))
    assert main(["verify", str(file), "--model", "demo"]) == 2
    told = capsys.readouterr().out
    assert "not verified: the receipt has another numeric contract: kv_dtype is int8 in the receipt" in told
    assert "\nequal: all 40 tokens" in told, "the list goes on behind it"
    file.write_text(json.dumps([wrong, {**right, "digest": "0"}]))
    assert main(["verify", str(file), "--model", "demo"]) == 1
    for content, part in (("{", "no receipt"), (json.dumps({"choices": [{}, {"receipt": right}]}), "of choice 1")):
        file.write_text(content)
        assert main(["verify", str(file), "--model", "demo"]) == 2
        assert part in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "none"), "demo"]) == 2


def test_a_model_that_cannot_run_is_no_difference(
    made: list[Receipt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(LLM, "from_config", fail)
    (tmp_path / "receipt.json").write_bytes(msgspec.json.encode(made[0]))
    assert main(["verify", str(tmp_path / "receipt.json"), "--model", "demo"]) == 2


def test_what_the_model_does_not_take_is_the_verdict_of_its_receipt(llm: LLM, made: list[Receipt]) -> None:
    replace = msgspec.structs.replace
    other, constraints = replace(made[0].contract, weights="0"), TokenConstraints(grammar="start: (")
    for receipt, part in (
        (replace(made[0], contract=other, contract_sha256=other.sha256), "weights"),
        (replace(made[0], output_token_ids=[10**6], digests=["0"]), "output_token_ids"),
        (replace(made[0], prompt_token_ids=[3] * 10**6), "max"),
        (replace(made[0], sampling={"top_k": 2**40}), "top_k"),
        (replace(made[0], output_token_ids=[3] * 10**6), "--max-model-len"),
        (replace(made[3], constraints=constraints), "grammar"),
    ):
        verdicts = llm.verify([made[1], receipt, made[0]])
        assert [verdict.equal for verdict in verdicts] == [True, False, True]
        assert verdicts[1].error is not None
        assert part in verdicts[1].error
        assert "\n" not in str(verdicts[1])
    for wrong in (5, None):
        with pytest.raises(ValueError, match="verify takes a list of receipts"):
            llm.verify([wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="verify takes a list of receipts"):
        llm.verify(made[0])  # type: ignore[arg-type]
    assert llm.verify(made[:1])[0].equal


def test_an_adapter_that_a_request_has_brought_is_known(tmp_path: Path, fork_server: ForkServer) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    adapter = LoRARequest("sql", 1, str(make_adapter(model, tmp_path / "adapter")))
    options: dict[str, Any] = {"enable_lora": True, "skip_tokenizer_init": True, "cpu_threads": 1}
    prompt, params = [5, 7, 9], SamplingParams(max_tokens=4, receipt=True, detokenize=False)
    with patch.object(lifeline, "start_process", fork_server.start_process), LLM(str(model), **options) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)
        receipt = output.outputs[0].receipt
        assert receipt is not None
        assert llm.verify([receipt])[0].equal
        [unknown] = llm.verify([msgspec.structs.replace(receipt, adapter="0" * 32)])
        assert "none of --lora-modules has this content" in str(unknown)
