"""What this host's kernels answer to one question, for a comparison with other hosts, and of ranks with each other.

Equal hosts answer with equal bits. If they do not, memory is bad or a CPU deviates, and the answers of a model would
depend on the host.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.kernels import HostKernels
from shardline.weights.formats.plain import Format

_WIDTH, _HIDDEN, _ROWS = 192, 256, 7
_TIMES = 3


def known_answers() -> dict[str, str]:
    """For each kernel path of this CPU, a digest of what a gated feed-forward block gives.

    Raises:
        RuntimeError: the same kernels give different bits.
    """
    found = {}
    for isa in _cpu.available_isas():
        _cpu.set_isa(isa)
        found[isa] = known_answer()
    return found


def known_answer() -> str:
    """The digest for the kernel path in use. It takes about 5 ms.

    Raises:
        RuntimeError: the same kernels give different bits.
    """
    digests = {_feed_forward_digest() for _ in range(_TIMES)}
    if len(digests) > 1:
        raise RuntimeError(
            f"the {_cpu.isa()} kernels give other bits each time; test the memory (`dmesg | grep -i mce`)"
        )
    return digests.pop()


def main() -> None:
    """Print the answers as JSON."""
    torch.set_num_threads(1)
    print(json.dumps(known_answers()))


def _feed_forward_digest() -> str:
    kernels, format, digest = HostKernels(), Format(), hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        gated = format.pack_gated(kernels, _numbers(_HIDDEN, _WIDTH, 1, dtype), _numbers(_HIDDEN, _WIDTH, 2, dtype))
        down = format.pack_linear(kernels, _numbers(_WIDTH, _HIDDEN, 3, dtype))
        out = down(gated(_numbers(_ROWS, _WIDTH, 4, dtype), None, "silu"))
        digest.update(out.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _numbers(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers from -1 to 1, computed from whole numbers, so that they are the same everywhere."""
    numbers = torch.arange(rows * columns, dtype=torch.int64) * 40503 + seed * 7919
    return ((numbers % 4093).to(torch.float32) / 2048 - 1).reshape(rows, columns).to(dtype)
