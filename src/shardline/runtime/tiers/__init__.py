"""A rank's part of the second tier of the KV cache: slots in host memory, and files behind them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from shardline.config.topology import RankPlace
from shardline.deployment.block_folder import layout_digest, rank_folder
from shardline.deployment.deployment import Deployment
from shardline.messages.copies import BlockCopies, BlockCopy, CopyResult
from shardline.runtime.kv_store import BlockCopier
from shardline.runtime.tiers.files import BlockFiles
from shardline.runtime.tiers.host import HostTier

_log = logging.getLogger(__name__)


class OwnCopies:
    """Of the copies of a plan, runs those of this rank's blocks, where ranks share the keys of a request."""

    def __init__(self, copier: BlockCopier, rank: int, num_ranks: int) -> None:
        """`copier` knows blocks and slots by their numbers on this rank."""
        self._copier, self._rank, self._num_ranks = copier, rank, num_ranks

    def copy_blocks(self, copies: BlockCopies, *, may_wait: bool) -> CopyResult:
        """See `BlockCopier`."""
        own = BlockCopies(self._own(copies.stores), self._own(copies.fetches))
        result = self._copier.copy_blocks(own, may_wait=may_wait)
        lost, late = (
            [slot * self._num_ranks + self._rank for slot in slots] for slots in (result.lost_slots, result.late_slots)
        )
        return CopyResult(lost, late, result.counts)

    def _own(self, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
        size = self._num_ranks
        own = [copy for copy in copies if copy.block % size == self._rank]
        return [BlockCopy(copy.group, copy.block // size, copy.slot // size, copy.key) for copy in own]


def open_tier(
    deployment: Deployment, engine: int, place: RankPlace, pages: Sequence[Sequence[Tensor]]
) -> BlockCopier | None:
    """The memory of a rank's part of the tier; None: the deployment has none. `pages`: see `HostTier`."""
    tier = deployment.cache.tier
    if not tier.num_slots:
        return None
    files = None
    if tier.folder:
        root, layout = Path(tier.folder), layout_digest(deployment)
        folder = rank_folder(root, layout, place)
        host = deployment.placements[engine][place.rank].host
        num_writers = sum(one.host == host for ranks in deployment.placements for one in ranks)
        files = BlockFiles(root, folder, layout, tier.folder_bytes, num_writers)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("KV offloading: rank %d writes no files: %s: %s", place.rank, folder, error.strerror)
    context = deployment.cache.context
    own = HostTier(pages, tier.num_slots // context, files)
    return own if context == 1 else OwnCopies(own, place.cp_rank, context)
