"""The receipt of one choice of an answer: all that its tokens depend on, the tokens, and digests of their logits.

It holds token ids and no text, apart from a grammar that the request had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shardline.deployment.fingerprint import NumericContract
from shardline.messages.request import AdapterRef, Constraints, Request
from shardline.sampling_params import SamplingParams

PREFIX_CHARS = 8
"""Of each position's digest, the receipt lists that many hex digits: they name the first position that differs. The
chained digest covers the whole digests, so it decides whether all are equal."""
_LEFT_OUT = frozenset(
    {
        # These change no token of an output.
        "n", "stop", "logprobs", "logprob_token_ids", "prompt_logprobs", "skip_special_tokens", "output_kind",
        "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize", "truncate_prompt_tokens",
        "logits_processors", "logits_digest", "receipt",
        # The receipt has what has become of these: the seed that was drawn, and constraints in tokens.
        "seed", "structured_outputs", "allowed_token_ids", "bad_words",
    }
)  # fmt: skip
"""The sampling parameters that a receipt does not hold."""

TokenIds = list[Annotated[int, Meta(ge=0, lt=2**32)]]


class TokenConstraints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """See `messages.request.Constraints`."""

    grammar: str = ""
    allowed_token_ids: TokenIds = []
    bad_words: list[TokenIds] = []

    @classmethod
    def from_message(cls, own: Constraints) -> TokenConstraints:
        """Those of a request."""
        words = [list(word) for word in own.bad_words]
        return cls(grammar=own.grammar, allowed_token_ids=list(own.allowed_token_ids), bad_words=words)

    def as_message(self) -> Constraints:
        """The same for a request."""
        return Constraints(self.grammar, tuple(self.allowed_token_ids), tuple(map(tuple, self.bad_words)))


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What `read_receipt` reads. Equal runs of equal requests under equal contracts have equal receipts."""

    shardline_receipt: Literal[1]
    """The version of this form."""
    contract: NumericContract
    contract_sha256: str
    prompt_token_ids: Annotated[TokenIds, Meta(min_length=1)]
    sampling: dict[str, Any]
    """The `SamplingParams` that choose tokens, those at their defaults left out."""
    seed: Annotated[str, Meta(pattern=r"^-?[0-9]{1,20}$")]
    """The seed that was given or drawn; a text, since JavaScript would round the number."""
    choice: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    eos_token_ids: TokenIds = []
    constraints: TokenConstraints | None = None
    adapter: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,128}$")] = ""
    """The digest of the LoRA adapter; empty: there was none."""
    output_token_ids: TokenIds
    digests: list[str]
    """For each token of the output, the first digits of the digest of the logits that it was chosen from."""
    digest: str
    """See `chain_digests`."""

    def params(self) -> SamplingParams:
        """The parameters with which the request runs again, to report digests of at most its output.

        Raises:
            ValueError: they are none.
        """
        count = max(1, len(self.output_token_ids))
        given = _convert(self.sampling)
        # Ends are banned before min_tokens, and the tokens below are too few to tell it from a larger one.
        least = min(given.min_tokens, count)
        seed = int(self.seed)
        return msgspec.structs.replace(given, seed=seed, max_tokens=count, min_tokens=least, logits_digest=True)

    def request(self, request_id: str, arrival_time: float, adapter: AdapterRef | None = None) -> Request:
        """The request that runs again. `adapter`: the one with the receipt's digest.

        Raises:
            ValueError: its parameters are invalid.
        """
        return Request(
            request_id=request_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.params(),
            expected_token_ids=self.output_token_ids,
            choice=self.choice,
            eos_token_ids=tuple(self.eos_token_ids),
            arrival_time=arrival_time,
            constraints=None if self.constraints is None else self.constraints.as_message(),
            adapter=adapter,
            streamed=False,
        )

    def chain(self, digests: Sequence[str]) -> str:
        """The chained digest over the receipt's request and tokens with these digests of logits.

        It is SHA-256 over the request (its JSON with sorted keys, see `_request`), then for each token over the digest
        so far, the token id as four bytes, lowest first, and the digest of its logits as 16 hex digits.
        """
        state = hashlib.sha256(self._request()).digest()
        for token_id, digest in zip(self.output_token_ids, digests, strict=True):
            state = hashlib.sha256(state + token_id.to_bytes(4, "little") + digest.encode()).digest()
        return state.hex()

    def _request(self) -> bytes:
        parts = {
            "shardline_receipt": self.shardline_receipt,
            "contract_sha256": self.contract_sha256,
            "prompt_token_ids": self.prompt_token_ids,
            "sampling": _choosing(_convert(self.sampling)),  # so 1 and 1.0 are one number
            "seed": self.seed,
            "choice": self.choice,
            "eos_token_ids": self.eos_token_ids,
            "constraints": self.constraints,
            "adapter": self.adapter,
        }
        return msgspec.json.encode(parts, order="sorted")


def make_receipt(
    contract: NumericContract, request: Request, token_ids: Sequence[int], digests: Sequence[str]
) -> Receipt:
    """The receipt of a request's output; `digests` has those of all its tokens, as `SequenceOutput.digests`."""
    own = request.constraints
    receipt = Receipt(
        shardline_receipt=1,
        contract=contract,
        contract_sha256=contract.sha256,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_choosing(request.sampling),
        seed=str(request.sampling.seed or 0),
        choice=request.choice,
        eos_token_ids=list(request.eos_token_ids),
        constraints=None if own is None else TokenConstraints.from_message(own),
        adapter="" if request.adapter is None else request.adapter.digest,
        output_token_ids=list(token_ids),
        digests=[digest[:PREFIX_CHARS] for digest in digests],
        digest="",
    )
    return msgspec.structs.replace(receipt, digest=receipt.chain(digests))


def read_receipt(value: Any) -> Receipt:
    """A receipt from its JSON, or from what that decodes to.

    Raises:
        ValueError: it has another form; the message is one line.
    """
    try:
        if isinstance(value, bytes | str):
            receipt = msgspec.json.decode(value, type=Receipt)
        else:
            receipt = msgspec.convert(value, Receipt)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"this is no receipt: {error}") from None
    if receipt.contract.sha256 != receipt.contract_sha256:
        raise ValueError("this is no receipt: contract_sha256 is not that of its contract")
    if len(receipt.digests) != len(receipt.output_token_ids):
        count = len(receipt.output_token_ids)
        raise ValueError(f"this is no receipt: it has {count} tokens of output and {len(receipt.digests)} digests")
    if not -(2**63) <= int(receipt.seed) < 2**64:
        raise ValueError("this is no receipt: its seed does not fit in 64 bits")
    receipt.params()
    return receipt


def find_receipts(data: bytes) -> list[Receipt]:
    """The receipts in a file: a receipt, an answer of a server with those of its choices, or a list of these.

    Raises:
        ValueError: there is none, one has another form, or a part of a list or a choice has none: it would count as
            verified.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"this is no receipt: {error}") from None
    found: list[Receipt] = []
    parts = value if isinstance(value, list) and value else [value]
    for number, part in enumerate(parts, 1):
        where = f"part {number} of {len(parts)}: " if isinstance(value, list) else ""
        try:
            entries = [] if isinstance(part, list) else _receipts_in(part)
            if not entries:
                raise ValueError('this is no receipt, and no answer that has any: its request needs "receipt": true')
            found += map(read_receipt, entries)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
    return found


def _receipts_in(value: Any) -> list[Any]:
    if not isinstance(value, dict) or "shardline_receipt" in value:
        return [value]
    choices = value["choices"] if isinstance(value.get("choices"), list) else []
    theirs = [choice.get("receipt") if isinstance(choice, dict) else None for choice in choices]
    missing = [str(number) for number, one in enumerate(theirs, 1) if one is None]
    if 0 < len(missing) < len(theirs):
        raise ValueError(f"the answer has {len(theirs)} choices, and no receipt of choice {', '.join(missing)}")
    return [one for one in (value.get("receipt"), *theirs) if one is not None]


def _choosing(params: SamplingParams) -> dict[str, Any]:
    """The parameters that choose tokens and are not at their defaults; parameters of later versions are among them."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(params))  # without defaults
    return {name: found[name] for name in sorted(found) if name not in _LEFT_OUT}


def _convert(sampling: dict[str, Any]) -> SamplingParams:
    for name in sampling:
        if name in _LEFT_OUT:
            raise ValueError(f"this is no receipt: its sampling parameters have {name!r}")
    try:
        return msgspec.convert(sampling, SamplingParams, str_keys=True)
    except ValueError as error:
        raise ValueError(f"this is no receipt: its sampling parameters are invalid: {error}") from None
