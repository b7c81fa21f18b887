"""A rank's part of the second tier of the KV cache: slots in host memory, and files behind them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from shardline.config.topology import RankPlace
from shardline.deployment.block_folder import layout_digest, rank_folder
from shardline.deployment.deployment import Deployment
from shardline.runtime.tiers.files import BlockFiles
from shardline.runtime.tiers.host import HostTier

_log = logging.getLogger(__name__)


def open_tier(
    deployment: Deployment, engine: int, place: RankPlace, pages: Sequence[Sequence[Tensor]]
) -> HostTier | None:
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
    return HostTier(pages, tier.num_slots, files)
