"""Whether a receipt's output is what its request gives when it runs again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.deployment.fingerprint import NumericContract
from shardline.receipts.receipt import PREFIX_CHARS, Receipt


class ContractDiffers(ValueError):
    """The receipt is of another model, dtype, KV cache dtype, version or kernel path, so nothing can be said of it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a receipt is worth. Its text is one line."""

    equal: bool
    num_positions: int
    """Tokens of the receipt's output."""
    digest: str
    """The receipt's chained digest."""
    own_digest: str | None = None
    """The same as it should be; None: the outputs differ in a token, so there is none."""
    position: int | None = None
    """The first position of the output that differs; None: all are equal, as far as the receipt lists them."""
    token_id: int | None = None
    """The receipt's token there."""
    own_token_id: int | None = None
    position_digest: str | None = None
    """The first digits of the digest of the logits there, according to the receipt."""
    own_position_digest: str | None = None
    error: str | None = None
    """Why nothing can be said of the receipt; None: something is."""

    def __str__(self) -> str:
        if self.error is not None:
            return f"not verified: {self.error}"
        if self.equal:
            return f"equal: all {self.num_positions} tokens and their logits, digest {self.digest}"
        if self.position is None:
            return (
                f"not equal: the {self.num_positions} tokens and the listed digests are right, but the receipt was "
                f"changed: its digest is {self.digest}, and should be {self.own_digest}"
            )
        what = "the tokens" if self.position_digest == self.own_position_digest else "the logits"
        own = "no token" if self.own_token_id is None else f"token {self.own_token_id}"
        return (
            f"not equal: {what} differ first at position {self.position} of {self.num_positions}: the receipt has "
            f"token {self.token_id} with digest {self.position_digest}, and the model gives {own} with digest "
            f"{self.own_position_digest}"
        )


def check_contract(receipt: Receipt, own: NumericContract) -> None:
    """Refuse a receipt that was made under another contract.

    Raises:
        ContractDiffers: the message names what differs.
    """
    if receipt.contract == own:
        return
    parts = []
    for name in NumericContract.__struct_fields__:
        theirs, ours = getattr(receipt.contract, name), getattr(own, name)
        if theirs != ours:
            parts.append(f"{name} is {theirs or 'the usual one'} in the receipt and {ours or 'the usual one'} here")
    raise ContractDiffers(f"the receipt has another numeric contract: {'; '.join(parts)}")


def not_verified(receipt: Receipt, error: str) -> Verdict:
    """The verdict on a receipt whose request cannot run."""
    return Verdict(equal=False, num_positions=len(receipt.output_token_ids), digest=receipt.digest, error=error)


def check_output(receipt: Receipt, token_ids: Sequence[int], digests: Sequence[str]) -> Verdict:
    """`token_ids` and `digests`: what the receipt's request gives, up to the first token that differs."""
    count = len(receipt.output_token_ids)
    for position in range(count):
        token_id, listed = receipt.output_token_ids[position], receipt.digests[position]
        has_own = position < len(token_ids)
        own_token_id = token_ids[position] if has_own else None
        own_listed = digests[position][:PREFIX_CHARS] if has_own else None
        if (token_id, listed) != (own_token_id, own_listed):
            return Verdict(
                equal=False,
                num_positions=count,
                digest=receipt.digest,
                position=position,
                token_id=token_id,
                own_token_id=own_token_id,
                position_digest=listed,
                own_position_digest=own_listed,
            )
    own_digest = receipt.chain(digests[:count])
    return Verdict(
        equal=own_digest == receipt.digest, num_positions=count, digest=receipt.digest, own_digest=own_digest
    )
