"""Reads weight files into the page cache, ahead of the ranks that copy from them."""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.gguf.checkpoint import SPLIT_LATENT_KEYS, GGUFCheckpoint
from shardline.checkpoints.lookup import family
from shardline.deployment.deployment import Deployment
from shardline.kernels.page_cache import CHUNK, fetch
from shardline.models.parameters import expert_of, parameters, parse_name
from shardline.models.spec import DecoderSpec

_LEAD = 2 << 30
"""Bytes that may be read and not yet copied. More of them could push each other out of a small memory."""
_PADDING = 64
"""Bytes between neighbours in a file that are less than this are read with them."""
_SECONDS = 0.05
"""How long to wait before the ranks' progress is looked at again."""


class FileRange(NamedTuple):
    """A part of a file."""

    file: Path
    start: int
    stop: int


@contextmanager
def read_ahead(ranges: Sequence[FileRange], copied: Callable[[], float]) -> Iterator[None]:
    """Read `ranges`, in order, in a thread of its own while the body runs.

    Ranks read a tensor when they need it, and then storage waits while they copy it. One thread of a node is enough:
    all of its ranks share the page cache, so each byte leaves storage once. What is in it already is not read.
    `copied`: the share of the ranges that ranks have copied, from 0 to 1.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_read, args=(ranges, copied, stop), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def node_ranges(deployment: Deployment, engine: int, rank: int) -> list[FileRange]:
    """What the ranks of an engine on the host of `rank` read, in the order in which they load it.

    Empty if weights are random, or if these ranks hold only parts of tensors, the others being on other hosts.

    Raises:
        ValueError: the checkpoint is corrupt.
    """
    model, grid = deployment.model, deployment.grid
    local = deployment.ranks_on(engine, deployment.placements[engine][rank].host)
    places = [grid.place(one) for one in local]
    if model.load_format == "dummy" or any(peer not in local for place in places for peer in place.peers("tensor")):
        return []
    stages = [deployment.stages[place.pp_rank] for place in places]
    layers = {index for stage in stages for index in range(stage.start, stage.stop)}
    expert_peers = {peer for place in places for peer in place.peers("expert")}
    shares_experts = deployment.expert_parallel and not expert_peers <= set(local)
    names = [
        name
        for name, _ in parameters(deployment.spec)
        if parse_name(name).layer in (None, *layers) and not (shares_experts and expert_of(name) is not None)
    ]
    names.sort(key=lambda name: not name.startswith("lm_head."))  # loaded first, since a tied embedding reads it
    if model.load_format == "gguf":
        return _joined(_gguf_ranges(GGUFCheckpoint.open(Path(model.folder)), deployment.spec, names))
    return _joined(_ranges(Checkpoint.open(Path(model.folder)), deployment.spec, names))


def _ranges(checkpoint: Checkpoint, spec: DecoderSpec, names: Iterable[str]) -> Iterator[FileRange]:
    """The tensors of parameters. A quantized weight is several tensors whose names begin alike."""
    source_of, keys = family(spec.model_type).tensor_source, sorted(checkpoint.tensors)
    for name in names:
        source = checkpoint.place(source_of(name, spec))
        for key in (source.key, *source.aliases):
            base = key.removesuffix("weight")
            for found in keys[bisect_left(keys, base) :]:
                if not found.startswith(base):
                    break
                entry = checkpoint.tensors[found]
                yield FileRange(entry.file, entry.offset, entry.offset + entry.num_bytes)


def _gguf_ranges(checkpoint: GGUFCheckpoint, spec: DecoderSpec, names: Iterable[str]) -> Iterator[FileRange]:
    shapes = dict(parameters(spec))
    for name in names:
        layer, part, _ = parse_name(name)
        if part == "attention.kv_up" and layer is not None and checkpoint.has_split_latents(layer):
            keys = [f"blk.{layer}.{key}" for key in SPLIT_LATENT_KEYS]
        else:
            keys = [checkpoint.find(name, shapes[name], spec).key]
        for tensor in (checkpoint.tensors[key] for key in keys):
            yield FileRange(tensor.file, tensor.offset, tensor.offset + tensor.num_bytes)


def _joined(ranges: Iterable[FileRange]) -> list[FileRange]:
    """The ranges, each once, neighbours in one."""
    joined: list[FileRange] = []
    for one in dict.fromkeys(ranges):
        if joined and joined[-1].file == one.file and joined[-1].stop <= one.start < joined[-1].stop + _PADDING:
            joined[-1] = joined[-1]._replace(stop=one.stop)
        else:
            joined.append(one)
    return joined


def _read(ranges: Sequence[FileRange], copied: Callable[[], float], stop: threading.Event) -> None:
    total, done = sum(one.stop - one.start for one in ranges), 0
    descriptors: dict[Path, int] = {}
    # The rank that loads a damaged file says what is wrong with it.
    with contextlib.suppress(OSError):
        for one in ranges:
            if one.file not in descriptors:
                descriptors[one.file] = os.open(one.file, os.O_RDONLY)
            for start in range(one.start, one.stop, CHUNK):
                while done > copied() * total + _LEAD and not stop.wait(_SECONDS):
                    pass
                if stop.is_set():
                    break
                size = min(CHUNK, one.stop - start)
                fetch(descriptors[one.file], start, size)
                done += size
    for descriptor in descriptors.values():
        os.close(descriptor)
