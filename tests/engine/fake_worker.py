"""A worker without a model: it stores, instead of keys and values, which token prefix they would come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardline.messages.copies import BlockCopies, CopyResult
from shardline.messages.request import Request
from shardline.messages.step import SequenceResult, SequenceStep, StepPlan, StepResult
from shardline.models.kv_groups import KVGroup
from shardline.sampling_params import SamplingParams

VOCAB = 5
EOS = 0


class Prefixes:
    """Exact names for token prefixes: equal names mean equal (root, tokens)."""

    def __init__(self) -> None:
        self._names: dict[tuple[object, int], int] = {}

    def extend(self, prefix: object, token_id: int) -> int:
        return self._names.setdefault((prefix, token_id), len(self._names))


def next_token(tokens: list[int], salt: str) -> int:
    """The fake model: any deterministic function of the whole prefix."""
    state = len(salt) + 7
    for token in tokens:
        state = (state * 1103515245 + token * 40503 + 12345) % 2147483647
    return state // 1000 % VOCAB


def reference(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """The output of a request that runs alone, and why it ends."""
    sampling, tokens, output = request.sampling, list(request.prompt_token_ids), []
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    while True:
        token = next_token(tokens, request.cache_salt)
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= sampling.min_tokens:
            return output, "stop"
        if len(output) == sampling.max_tokens or len(tokens) == max_model_len:
            return output, "length"


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> Request:
    sampling: dict[str, Any] = {"max_tokens": max_tokens}
    for key in ("min_tokens", "ignore_eos", "stop_token_ids"):
        if key in options:
            sampling[key] = options.pop(key)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        eos_token_ids=(EOS,),
        **options,
    )


@dataclass
class _Sequence:
    tokens: list[int]
    salt: str
    prefixes: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    next_start: int | None = None
    num_guessed: int = 0
    had_drafts: bool = False

    def forget_from(self, num_tokens: int) -> None:
        """Forget all but the first tokens, and that some were guesses."""
        del self.tokens[num_tokens:]
        del self.prefixes[num_tokens:]
        self.num_guessed = 0


class FakeWorker:
    """Runs plans in order and checks that each step finds in the cache exactly what it would read.

    `sees_samples=False` is a pipeline's first stage, which knows generated tokens only from plans. `salts` tells the
    salt of each request id, which a real worker does not know: KV of another salt counts as wrong.
    """

    def __init__(
        self,
        groups: tuple[KVGroup, ...],
        block_size: int,
        *,
        max_model_len: int,
        sees_samples: bool = True,
        tokens_per_result: int = 1,
        loses: Callable[[], bool] = lambda: False,
    ) -> None:
        """`loses`: whether the next fetch finds nothing; from files, whether it is late."""
        self._groups = groups
        self._loses = loses
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._sees_samples = sees_samples
        self._tokens_per_result = tokens_per_result
        self._prefixes = Prefixes()
        self._pool: dict[tuple[int, int], tuple[int, int] | None] = {}
        """(block, offset) -> (group, prefix)"""
        self._tier: dict[int, tuple[bytes, list[tuple[int, int] | None]]] = {}
        """slot -> its key and the content of a block"""
        self._files: dict[bytes, list[tuple[int, int] | None]] = {}
        self.sequences: dict[int, _Sequence] = {}
        self.num_computed_tokens = 0

    def run(self, plan: StepPlan, salts: dict[int, str]) -> StepResult:
        copied = None if plan.copies is None else self._copy(plan.copies)
        for seq_id in plan.ends:
            del self.sequences[seq_id]
        for start in plan.starts:
            assert start.seq_id not in self.sequences
            tables: list[list[int]] = [[] for _ in self._groups]
            self.sequences[start.seq_id] = _Sequence(list(start.token_ids), salts[start.seq_id], [], tables)
        assert len({step.seq_id for step in plan.steps}) == len(plan.steps)
        for step in plan.steps:
            self._apply(step)
        # As layers do: all of a step's tokens are stored, then all are attended to.
        for step in plan.steps:
            self._write(step)
        for step in plan.steps:
            self._check(step)
        results = [self._sample(step) for step in plan.steps if step.sample]
        return StepResult(plan.step_id, [result for result in results if result is not None], 0.001, copied)

    def _copy(self, copies: BlockCopies) -> CopyResult:
        """A slot keeps its last content under its key. What it has not, files have: all that was ever stored."""
        offsets = range(self._block_size)
        lost: list[int] = []
        late: list[int] = []
        for copy in copies.stores:
            content = [self._pool.get((copy.block, offset)) for offset in offsets]
            assert {entry and entry[0] for entry in content} == {copy.group}, "a block that is not full is stored"
            self._tier[copy.slot] = copy.key, content
            self._files[copy.key] = content
        for copy in copies.fetches:
            held, content = self._tier.get(copy.slot, (b"", []))
            if held != copy.key:
                content = self._files[copy.key]
                self._tier[copy.slot] = copy.key, content
                if self._loses():
                    late.append(copy.slot)
                    continue
            if self._loses():
                lost.append(copy.slot)
                content = [None] * self._block_size
            self._pool |= {(copy.block, offset): content[offset] for offset in offsets}
        return CopyResult(lost, late)

    def _apply(self, step: SequenceStep) -> None:
        sequence = self.sequences[step.seq_id]
        for table, blocks in zip(sequence.tables, step.new_blocks, strict=True):
            table.extend(blocks)
        if sequence.num_guessed:
            # Only the plan tells a worker that does not sample which guesses were right.
            assert len(sequence.tokens) - sequence.num_guessed <= step.start <= len(sequence.tokens)
            sequence.forget_from(step.start)
        elif sequence.next_start is not None:
            assert step.start == sequence.next_start
        sequence.next_start = end = step.start + step.num_tokens
        assert step.num_tokens > len(step.draft_token_ids)
        assert end < self._max_model_len
        if step.start == len(sequence.tokens):
            assert step.token_id >= 0, "a token that this worker does not know"
            sequence.tokens.append(step.token_id)
        if step.draft_token_ids:
            assert step.sample
            assert step.start + 1 == len(sequence.tokens), "a draft follows the last token"
            sequence.tokens += step.draft_token_ids
            sequence.num_guessed = len(step.draft_token_ids)
            sequence.had_drafts = True
        if step.token_id >= 0:
            assert step.token_id == sequence.tokens[step.start]
        assert end <= len(sequence.tokens)
        assert not step.sample or end == len(sequence.tokens)
        for table in sequence.tables:
            needed = -(-end // self._block_size)
            assert len(table) >= needed if sequence.had_drafts else len(table) == needed
        for token in sequence.tokens[len(sequence.prefixes) :]:
            before = sequence.prefixes[-1] if sequence.prefixes else ("root", sequence.salt)
            sequence.prefixes.append(self._prefixes.extend(before, token))

    def _slot(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self._block_size], position % self._block_size

    def _check(self, step: SequenceStep) -> None:
        sequence = self.sequences[step.seq_id]
        for index, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            first = 0 if group.window is None else max(0, step.start - group.window + 1)
            for position in range(first, step.start + step.num_tokens):
                slot = self._slot(table, position)
                assert slot[0] != 0, "the null block is read"
                assert self._pool.get(slot) == (index, sequence.prefixes[position])

    def _write(self, step: SequenceStep) -> None:
        sequence = self.sequences[step.seq_id]
        for position in range(step.start, step.start + step.num_tokens):
            for index, table in enumerate(sequence.tables):
                slot = self._slot(table, position)
                assert slot[0] != 0, "the null block is written"
                self._pool[slot] = (index, sequence.prefixes[position])
        self.num_computed_tokens += step.num_tokens

    def _sample(self, step: SequenceStep) -> SequenceResult | None:
        if not self._sees_samples:
            return None
        sequence = self.sequences[step.seq_id]
        sequence.forget_from(len(sequence.tokens) - len(step.draft_token_ids))
        sampled: list[int] = []
        for guess in (*step.draft_token_ids, *[None] * self._tokens_per_result):
            sampled.append(next_token(sequence.tokens + sampled, sequence.salt))
            if step.draft_token_ids and sampled[-1] != guess:
                break
        if step.draft_token_ids:
            sequence.next_start = step.start + len(sampled)
        sequence.tokens += sampled
        return SequenceResult(step.seq_id, sampled, guesses=self._guess(sequence, step.num_guesses))

    def _guess(self, sequence: _Sequence, count: int) -> list[int]:
        """What comes next; some guesses are wrong, and some are missing, as if the draft model was not ready."""
        guesses: list[int] = []
        for _ in range(count if len(sequence.tokens) % 5 else count // 2):
            guesses.append(next_token(sequence.tokens + guesses, sequence.salt))
        if guesses and len(sequence.tokens) % 3 == 0:
            guesses[-1] = (guesses[-1] + 1) % VOCAB
        return guesses
