"""Everything that looks after the fleet while requests go through it."""

from __future__ import annotations

import asyncio

from shardline.config.router import RouterConfig
from shardline.router.discovery import Discovery
from shardline.router.fleet import Fleet
from shardline.router.health import HealthChecker, watch_backends
from shardline.router.kv_follower import KVFollower


async def watch_fleet(fleet: Fleet, config: RouterConfig) -> None:
    """Find backends, check them, and follow their caches, until cancelled."""
    follower = KVFollower(fleet.kv, config) if config.policy == "kv_aware" else None
    jobs = [HealthChecker(fleet, config).run(), Discovery(fleet, config).run()]
    if follower is not None:
        jobs.append(watch_backends(fleet, follower.follow, config.health_interval / 4))
    try:
        await asyncio.gather(*jobs)
    finally:
        if follower is not None:
            follower.close()
