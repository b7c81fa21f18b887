"""A rank's slots and files against a dictionary that never forgets, and against what may happen to files."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardline.deployment.block_folder import KEY_BYTES
from shardline.kernels import block_copies
from shardline.messages.copies import BlockCopies, BlockCopy, CopyCounts, CopyResult
from shardline.runtime.tiers import host as host_module
from shardline.runtime.tiers.files import BlockFiles, CorruptFile
from shardline.runtime.tiers.host import HostTier

NUM_BLOCKS = 5
LAYOUT = b"the layout of it"


def make_pages() -> list[list[Tensor]]:
    """Two groups: keys and values with scales, and one that has nothing on this rank."""
    shapes = [((2, 16, 3), torch.bfloat16), ((2, 16, 3), torch.int8), ((16,), torch.float32)]
    return [[torch.zeros((NUM_BLOCKS, *shape), dtype=dtype) for shape, dtype in shapes], []]


def fill(pages: list[list[Tensor]], block: int, number: int) -> None:
    for one in pages[0]:
        one[block] = number


def content(pages: list[list[Tensor]], block: int) -> set[float]:
    return {value for one in pages[0] for value in one[block].flatten().tolist()}


def key_of(number: int) -> bytes:
    return number.to_bytes(1, "big") * KEY_BYTES


def open_files(folder: Path, budget: int = 1 << 20) -> BlockFiles:
    own = folder / LAYOUT.hex() / "pp0-cp0-tp0"
    return BlockFiles(folder, own, LAYOUT, budget, 1)


def store(tier: HostTier, pages: list[list[Tensor]], number: int, slot: int) -> CopyResult:
    fill(pages, 1, number)
    return tier.copy_blocks(BlockCopies([BlockCopy(0, 1, slot, key_of(number))], []), may_wait=False)


def fetch(tier: HostTier, number: int, slot: int, block: int = 2) -> CopyResult:
    """Fetch until it is not late any more."""
    total = CopyResult()
    while True:
        result = tier.copy_blocks(BlockCopies([], [BlockCopy(0, block, slot, key_of(number))]), may_wait=True)
        total = CopyResult(result.lost_slots, [], (total + result).counts)
        if not result.late_slots:
            return total


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def stored(folder: Path, *numbers: int) -> None:
    """Write the files of blocks."""
    pages = make_pages()
    tier = HostTier(pages, len(numbers), open_files(folder))
    for slot, number in enumerate(numbers):
        store(tier, pages, number, slot)
    wait_until(lambda: len([one for one in files_in(folder) if not one.name.endswith(".part")]) == len(numbers))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 2)), max_size=30), st.booleans())
def test_what_is_fetched_was_stored(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple], files: bool) -> None:
    """A dictionary knows all that was stored. What comes back is that, and nothing is lost that a slot has."""
    pages, known, slots = make_pages(), set[int](), dict[int, int]()
    folder = tmp_path_factory.mktemp("blocks")
    tier = HostTier(pages, 3, open_files(folder) if files else None)
    for stores, number, slot in steps:
        if stores:
            store(tier, pages, number, slot)
            known.add(number)
            slots[slot] = number
            continue
        fill(pages, 2, 0)
        result = fetch(tier, number, slot)
        assert (result.counts.corrupt_blocks, result.counts.file_errors) == (0, 0)
        if result.lost_slots:
            # A slot may be overwritten before its file is written.
            assert slots.get(slot) != number
            if files:
                slots.pop(slot, None)
        else:
            assert number in known
            assert content(pages, 2) == {number}
            slots[slot] = number


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 129, 5000])
def test_a_checksum_tells_every_bit(num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    memory = torch.tensor(bytearray(rng.randbytes(num_bytes)), dtype=torch.uint8)
    total = block_copies.checksum(memory)
    for _ in range(300):
        place, bit = rng.randrange(num_bytes), 1 << rng.randrange(8)
        memory[place] ^= bit
        assert block_copies.checksum(memory) != total
        memory[place] ^= bit
    assert block_copies.checksum(memory) == total
    assert block_copies.checksum(torch.zeros(num_bytes, dtype=torch.uint8)) != block_copies.checksum(
        torch.zeros(num_bytes + 1, dtype=torch.uint8)
    )


def test_all_instruction_sets_have_the_same_checksum() -> None:
    from shardline import _cpu

    memory, used = torch.arange(5000).to(torch.uint8), _cpu.isa()
    totals = set()
    for isa in _cpu.available_isas():
        _cpu.set_isa(isa)
        totals.add(_cpu.checksum(memory))
    _cpu.set_isa(used)
    assert len(totals) == 1


def test_copies_of_other_devices_are_the_same_bytes() -> None:
    """What runs for a GPU's pages, here on those of a host."""
    pages = [torch.randn(4, 2, 16, 3).to(torch.bfloat16), torch.randn(4, 7)]
    size = 2 * 16 * 3 * 2 + 28
    slot, other = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    total = block_copies.copy_block_out(pages, 2, slot)

    class Elsewhere:
        type = "elsewhere"

    class Pages(torch.Tensor):
        device = Elsewhere()  # type: ignore[assignment]

    away = [one.clone().as_subclass(Pages) for one in pages]
    assert block_copies.copy_block_out(away, 2, other) == total
    assert torch.equal(slot, other)
    for one in away:
        one.zero_()
    assert block_copies.copy_block_in(other, away, 2) == total
    assert all(torch.equal(one[2], two[2].as_subclass(torch.Tensor)) for one, two in zip(pages, away, strict=True))


def test_a_bit_that_flips_in_host_memory_is_found() -> None:
    pages, rng = make_pages(), random.Random(1)
    tier = HostTier(pages, 1)
    store(tier, pages, 1, 0)
    size = tier._sizes[0]
    for _ in range(400):
        place, bit = rng.randrange(size), 1 << rng.randrange(8)
        kept = tier._contents[0]
        tier._memory[0, place] ^= bit
        result = fetch(tier, 1, 0)
        assert (result.lost_slots, result.counts.corrupt_blocks) == ([0], 1)
        tier._memory[0, place] ^= bit
        tier._contents[0] = kept
    assert fetch(tier, 1, 0).lost_slots == []
    assert content(pages, 2) == {1}


def test_a_bit_that_flips_in_a_file_is_found(tmp_path: Path) -> None:
    """Its header included. The file goes, and is written again with its block."""
    stored(tmp_path, 1)
    (path,), rng = files_in(tmp_path), random.Random(2)
    whole = path.read_bytes()
    for _ in range(400):
        broken = bytearray(whole)
        broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        with pytest.raises(CorruptFile):
            open_files(tmp_path).read(key_of(1), torch.empty(len(whole) - 64, dtype=torch.uint8))
        assert not path.exists()
    path.write_bytes(whole)
    tier = HostTier(pages := make_pages(), 1, open_files(tmp_path))
    assert fetch(tier, 1, 0).lost_slots == []
    assert content(pages, 2) == {1}


@pytest.mark.parametrize("change", ["cut", "longer", "empty", "another's", "of another layout"])
def test_a_file_that_is_not_what_was_written_is_lost_and_counted(change: str, tmp_path: Path) -> None:
    stored(tmp_path, 1, 2)
    first, second = files_in(tmp_path)
    whole = first.read_bytes()
    layouts = whole.replace(LAYOUT, b"another's layout")
    changed = {"cut": whole[:-1], "longer": whole + b"0", "empty": b"", "another's": second.read_bytes()}
    first.write_bytes(changed.get(change, layouts))
    tier = HostTier(make_pages(), 1, open_files(tmp_path))
    result = fetch(tier, 1, 0)
    assert (result.lost_slots, result.counts.corrupt_blocks) == ([0], 1)
    assert not first.exists()
    assert fetch(tier, 2, 0).lost_slots == []


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    pages = make_pages()
    ours, theirs = (HostTier(pages, 2, open_files(tmp_path)) for _ in range(2))
    store(ours, pages, 1, 0)
    wait_until(lambda: len(files_in(tmp_path)) == 1)
    assert fetch(theirs, 1, 1).lost_slots == []
    assert store(theirs, pages, 1, 0).counts.written_bytes == 0
    assert fetch(theirs, 3, 0).lost_slots == [0]
    assert len(files_in(tmp_path)) == 1


def test_a_process_that_is_killed_while_it_writes_leaves_no_block(tmp_path: Path) -> None:
    """It is stopped before it renames, again and again; some files are whole, others have only a temporary name."""
    script = textwrap.dedent("""
        import os, signal, sys, torch
        from pathlib import Path
        from shardline.kernels.block_copies import checksum
        from shardline.runtime.tiers import files
        root = Path(sys.argv[1])
        layout = b"the layout of it"
        target = files.BlockFiles(root, root / layout.hex() / "pp0-cp0-tp0", layout, 1 << 30, 1)
        content = torch.full((1 << 16,), 7, dtype=torch.uint8)
        write, count = os.writev, 0
        def slow(file, parts):
            global count
            count += 1
            if count == 4:
                write(file, [parts[0], parts[1][: 1 << 15]])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(file, parts)
        os.writev = slow
        for number in range(9):
            target.write(bytes([number]) * 18, content, checksum(content), lambda: True)
    """)
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, env=os.environ)
    assert ended.returncode == -9
    unfinished = [path for path in files_in(tmp_path) if path.name.endswith(".part")]
    assert len(unfinished) == 1
    files, content = open_files(tmp_path, 1 << 30), torch.zeros(1 << 16, dtype=torch.uint8)
    for number in range(9):
        if number < 3:
            files.read(bytes([number]) * 18, content)
            assert set(content.tolist()) == {7}
        else:
            with pytest.raises(FileNotFoundError):
                files.read(bytes([number]) * 18, content)
    os.utime(unfinished[0], (0, 0))
    files.trim()
    assert not unfinished[0].exists()
    assert len(files_in(tmp_path)) == 3


def test_the_folder_is_held_to_its_budget_and_the_longest_unused_go_first(tmp_path: Path) -> None:
    size = 1000
    files, part = open_files(tmp_path, 20 * size), torch.zeros(size - 64, dtype=torch.uint8)
    total = block_copies.checksum(part)
    for number in range(60):
        files.write(key_of(number), part, total, lambda: True)
        for path in files_in(tmp_path):
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))  # time passes
        if number >= 3:
            files.read(key_of(3), part)  # what is used stays
        assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 20 * size
    names = {path.parent.name for path in files_in(tmp_path)}
    assert {"03", "3b", "3a"} <= names
    assert len(names) >= 17
    assert "04" not in names


def test_files_of_others_stay(tmp_path: Path) -> None:
    foreign = [
        tmp_path / "mine",
        tmp_path / "photos" / "2024" / "ab" / "sea",
        tmp_path / "photos" / "film.part",
        tmp_path / LAYOUT.hex() / "pp0-cp0-tp0" / "03" / "notes",
    ]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(9000))
        os.utime(path, (0, 0))
    files, part = open_files(tmp_path, 2000), torch.zeros(900, dtype=torch.uint8)
    for number in range(9):
        files.write(key_of(number), part, block_copies.checksum(part), lambda: True)
    files.trim()
    own = [path for path in files_in(tmp_path) if path not in foreign]
    assert 0 < len(own) <= 2
    assert all(path.exists() for path in foreign)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_left_alone_for_a_while(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full or a read-only one: one line, blocks stay in host memory, and after a pause it is tried again."""
    pages = make_pages()
    tier = HostTier(pages, 3, open_files(tmp_path))
    with patch.object(os, "writev", side_effect=OSError(number, os.strerror(number))):
        store(tier, pages, 1, 0)
        wait_until(lambda: bool(caplog.records))
        result = store(tier, pages, 2, 1)
    assert (result.counts.file_errors, result.counts.written_bytes) == (1, 0)
    (line,) = [record.message for record in caplog.records]
    assert os.strerror(number) in line
    assert files_in(tmp_path) == []
    assert fetch(tier, 1, 0).lost_slots == []
    assert fetch(tier, 2, 1).lost_slots == []
    tier._paused_until = 0
    store(tier, pages, 3, 2)
    wait_until(lambda: len(files_in(tmp_path)) == 1)


def test_a_slow_disk_holds_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch is late, then lost; until the file has been read, nobody else writes to its slot."""
    stored(tmp_path, 1)
    pages = make_pages()
    tier, read = HostTier(pages, 1, open_files(tmp_path)), os.preadv
    slow = threading.Event()

    def wait_and_read(*arguments: object) -> int:
        slow.wait(30)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", wait_and_read)
    asked = BlockCopies([], [BlockCopy(0, 2, 0, key_of(1))])
    assert tier.copy_blocks(asked, may_wait=False).late_slots == [0]
    assert tier.copy_blocks(asked, may_wait=True).late_slots == [0]
    monkeypatch.setattr(host_module, "LATE_SECONDS", 0.0)
    result = tier.copy_blocks(asked, may_wait=True)
    assert (result.lost_slots, result.late_slots, result.counts.file_errors) == ([0], [], 1)
    assert len(caplog.records) == 1
    store(tier, pages, 2, 0)
    assert tier.copy_blocks(BlockCopies([], [BlockCopy(0, 2, 0, key_of(2))]), may_wait=False).lost_slots == [0]
    slow.set()
    wait_until(lambda: not isinstance(tier._contents[0], host_module._Reading))
    assert fetch(tier, 1, 0).lost_slots == []
    assert content(pages, 2) == {1}


def test_copies_are_counted() -> None:
    pages = make_pages()
    tier = HostTier(pages, 2)
    size = sum(one[0].numel() * one.element_size() for one in pages[0])
    result = store(tier, pages, 1, 0)
    assert result.counts == CopyCounts(stored_bytes=size, stored_seconds=result.counts.stored_seconds)
    assert result.counts.stored_seconds > 0
    result = fetch(tier, 1, 0)
    assert result.counts == CopyCounts(fetched_bytes=size, fetched_seconds=result.counts.fetched_seconds)
    empty = BlockCopies([BlockCopy(1, 3, 1, key_of(9))], [])
    assert tier.copy_blocks(empty, may_wait=False).lost_slots == []
