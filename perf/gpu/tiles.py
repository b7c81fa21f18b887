"""Tiles of the linear kernel that are worth timing in addition to the one that it chooses."""

from __future__ import annotations

from shardline.kernels.cuda.triton.gemm import Tile


class _Named(Tile):
    @property
    def name(self) -> str:
        return f"{self.rows}x{self.columns} w{self.num_warps} s{self.num_stages}"


FEW_ROWS = [
    _Named(16, 64, 4, 4),
    _Named(16, 64, 4, 8),
    _Named(16, 128, 8, 5),
    _Named(32, 64, 4, 8),
    _Named(64, 64, 4, 6),
]
MANY_ROWS = [
    _Named(64, 64, 4, 4),
    _Named(64, 128, 4, 4),
    _Named(128, 64, 8, 4),
    _Named(128, 64, 4, 4),
    _Named(128, 128, 8, 3),
    _Named(128, 128, 4, 3),
    _Named(128, 256, 8, 2),
    _Named(256, 128, 8, 2),
]
LINEAR_TILES = list(dict.fromkeys(FEW_ROWS + MANY_ROWS))
