"""The form of receipts, and what is found in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.deployment.fingerprint import NumericContract
from shardline.messages.request import Constraints, Request
from shardline.receipts.check import ContractDiffers, check_contract, check_output
from shardline.receipts.receipt import Receipt, find_receipts, make_receipt, read_receipt
from shardline.sampling_params import SamplingParams, StructuredOutputsParams

CONTRACT = NumericContract("abc", "bfloat16", kv_dtype="int8", numerics="n8", kernel_path="x")
PARAMS = SamplingParams(
    temperature=0.7, top_k=5, seed=2**63 + 1, max_tokens=9, min_tokens=2, logit_bias={7: 1.5}, stop_token_ids=(3,),
    n=4, logprobs=2, logits_digest=True, bad_words=["x"], stop=["secret"],
)  # fmt: skip
REQUEST = Request(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling=PARAMS,
    choice=3,
    eos_token_ids=(0, 2),
    constraints=Constraints("root ::= a", (4, 5), ((6, 7),)),
)
TOKENS = [9, 8, 7, 7]
DIGESTS = [f"{value:016x}" for value in (2**64 - 1, 2**60 + 7, 5, 6)]
RECEIPT = make_receipt(CONTRACT, REQUEST, TOKENS, DIGESTS)


def test_a_receipt_says_what_tokens_depend_on_and_holds_no_text() -> None:
    told = msgspec.json.decode(msgspec.json.encode(RECEIPT))
    assert told["contract_sha256"] == CONTRACT.sha256
    assert told["prompt_token_ids"] == [1, 2, 3]
    assert told["output_token_ids"] == TOKENS
    assert told["digests"] == ["ffffffff", "10000000", "00000000", "00000000"]
    assert told["sampling"] == {
        "logit_bias": {"7": 1.5}, "max_tokens": 9, "min_tokens": 2, "stop_token_ids": [3], "temperature": 0.7,
        "top_k": 5,
    }  # fmt: skip
    assert (told["seed"], told["choice"]) == (str(2**63 + 1), 3)
    assert "secret" not in str(told)
    again = read_receipt(told)
    assert again == RECEIPT == read_receipt(msgspec.json.encode(RECEIPT))
    request = again.request("v", 1.0)
    assert request.constraints == REQUEST.constraints
    assert (request.choice, request.eos_token_ids) == (3, (0, 2))
    assert request.expected_token_ids == TOKENS
    params = request.sampling
    assert (params.seed, params.max_tokens, params.min_tokens, params.n) == (2**63 + 1, 4, 2, 1)
    assert params.logits_digest
    assert check_output(again, TOKENS, DIGESTS).equal


def test_every_parameter_counts_unless_it_is_known_to_choose_no_token() -> None:
    others: dict[str, Any] = {
        "structured_outputs": StructuredOutputsParams(choice=["a"]), "stop": ["x"], "output_kind": 1,
        "allowed_token_ids": [1], "bad_words": ["b"], "logprob_token_ids": [1], "logits_processors": 1,
        "watermarking": True,
    }  # fmt: skip
    silent = set()
    for name in SamplingParams.__struct_fields__:
        default = getattr(SamplingParams(), name)
        value = others.get(name, 7 if default is None else {1: 2.0} if default == {} else 0.25)
        params = SamplingParams()
        setattr(params, name, [3] if default == () and name not in others else value)
        if name in ("n", "top_k", "max_tokens", "min_tokens", "seed"):
            setattr(params, name, 7)
        if isinstance(default, bool):
            setattr(params, name, not default)
        request = Request(request_id="r", prompt_token_ids=[1], sampling=params)
        plain = Request(request_id="r", prompt_token_ids=[1], sampling=SamplingParams())
        if make_receipt(CONTRACT, request, [], []).digest == make_receipt(CONTRACT, plain, [], []).digest:
            silent.add(name)
    # Constraints are there as tokens.
    assert silent == {
        "n", "stop", "logprobs", "logprob_token_ids", "prompt_logprobs", "structured_outputs", "allowed_token_ids",
        "bad_words", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
        "detokenize", "output_kind", "truncate_prompt_tokens", "logits_processors", "logits_digest", "receipt",
    }  # fmt: skip


def change(**fields: Any) -> Receipt:
    return msgspec.structs.replace(RECEIPT, **fields)


CHANGES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt_token_ids": [1, 2, 4]},
    "temperature": {"sampling": {**RECEIPT.sampling, "temperature": 0.71}},
    "default": {"sampling": {name: RECEIPT.sampling[name] for name in RECEIPT.sampling if name != "top_k"}},
    "seed": {"seed": "4"},
    "choice": {"choice": 0},
    "ends": {"eos_token_ids": [0]},
    "constraints": {"constraints": None},
    "contract": {"contract_sha256": "0" * 64},
    "digest": {"digest": "0" * 64},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_changes_no_token_is_found_by_the_chained_digest(name: str) -> None:
    verdict = check_output(change(**CHANGES[name]), TOKENS, DIGESTS)
    assert not verdict.equal
    assert verdict.position is None
    assert verdict.own_digest != verdict.digest
    assert "the receipt was changed" in str(verdict)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_first_position_that_differs_is_named(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    values = data.draw(st.lists(st.integers(0, 2**64 - 1), min_size=count, max_size=count))
    digests = [f"{value:016x}" for value in values]
    receipt = make_receipt(CONTRACT, REQUEST, tokens, digests)
    assert check_output(receipt, tokens, digests).equal
    place = data.draw(st.integers(0, count - 1))
    own_tokens, own_digests = list(tokens), list(digests)
    kind = data.draw(st.sampled_from(["token", "logits", "low bits", "end"]))
    if kind == "token":
        own_tokens[place] += 1
    elif kind == "end":
        del own_tokens[place:], own_digests[place:]
    else:
        own_digests[place] = f"{values[place] ^ (1 << (63 if kind == 'logits' else 3)):016x}"
    verdict = check_output(receipt, own_tokens, own_digests)
    assert not verdict.equal
    # The receipt lists half of each digest; the chained one tells that the rest differs.
    assert verdict.position == (None if kind == "low bits" else place)
    assert "\n" not in str(verdict)


def test_numbers_may_be_written_as_javascript_does() -> None:
    made = make_receipt(CONTRACT, msgspec.structs.replace(REQUEST, sampling=SamplingParams(min_p=1.0, seed=1)), [], [])
    told = msgspec.json.encode(made).replace(b'"min_p":1.0', b'"min_p":1')
    assert b'"min_p":1}' in told
    assert check_output(read_receipt(told), [], []).equal


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"shardline_receipt": 2}, "shardline_receipt"),
        ({"extra": 1}, "extra"),
        ({"digests": ["00"]}, "4 tokens of output and 1 digests"),
        ({"seed": "x"}, "seed"),
        ({"seed": "99999999999999999999"}, "64 bits"),
        ({"choice": 2**31}, "choice"),
        ({"output_token_ids": [-1] * 4}, "output_token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"sampling": {"temperature": -1}}, "temperature must be in"),
        ({"sampling": {"later": 1}}, "later"),
        ({"sampling": {"n": 2}}, "'n'"),
        ({"contract_sha256": "00"}, "contract_sha256"),
        ({"constraints": {"regex": "a"}}, "regex"),
    ],
)
def test_another_form_is_refused_in_one_line(fields: dict[str, Any], part: str) -> None:
    told = {**msgspec.to_builtins(RECEIPT, str_keys=True), **fields}
    with pytest.raises(ValueError, match="this is no receipt") as error:
        read_receipt(told)
    assert part in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="this is no receipt"):
        find_receipts(msgspec.json.encode({"choices": [{"receipt": told}]}))


def test_receipts_are_found_in_answers() -> None:
    told = msgspec.to_builtins(RECEIPT, str_keys=True)
    for answer, count in (
        (told, 1), ([told, told], 2), ({"choices": [{"receipt": told}, {"receipt": told}]}, 2), ({"receipt": told}, 1),
    ):  # fmt: skip
        assert find_receipts(msgspec.json.encode(answer)) == [RECEIPT] * count
    for other in (b"", b"\xff", b"3", b"[" * 5000, b'{"choices": 3}', b'{"choices": [{}]}', b"[]", b'[{"a": 1}]'):
        with pytest.raises(ValueError, match="this is no receipt"):
            find_receipts(other)
    for bad in ({"choices": [{"text": "x"}]}, {**told, "digests": []}, [told]):  # it would count as verified
        with pytest.raises(ValueError, match=r"^part 2 of 3: this is no receipt"):
            find_receipts(msgspec.json.encode([told, bad, told]))
    for choice in ({"text": "x"}, {"receipt": None}, 3):
        lacking = {"choices": [choice, {"receipt": told}, choice]}
        with pytest.raises(ValueError, match=r"^the answer has 3 choices, and no receipt of choice 1, 3$"):
            find_receipts(msgspec.json.encode(lacking))
        with pytest.raises(ValueError, match=r"^part 2 of 2: the answer has 3 choices"):
            find_receipts(msgspec.json.encode([told, lacking]))


def test_a_receipt_of_an_unlike_contract_is_refused_by_name() -> None:
    check_contract(RECEIPT, CONTRACT)
    other = msgspec.structs.replace(CONTRACT, kv_dtype="", weights="abd")
    with pytest.raises(ContractDiffers, match=r"weights is abc in the receipt and abd here; kv_dtype is int8 in the"):
        check_contract(RECEIPT, other)
