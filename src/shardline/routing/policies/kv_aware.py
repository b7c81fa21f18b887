"""`least_work` by what the caches of replicas say that they hold, where they say it."""

from __future__ import annotations

from shardline.routing.policies.least_work import choose as choose

USES_LOAD = True
USES_PREFIX = True
USES_WARM_CHUNKS = True
