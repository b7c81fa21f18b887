"""The life of a router process: bind the port, watch the backends, serve, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from shardline import __version__
from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig
from shardline.limits import raise_file_limit
from shardline.log import configure_logging
from shardline.router.app import create_app
from shardline.router.discovery import Discovery
from shardline.router.fleet import Fleet
from shardline.router.health import HealthChecker, watch_backends
from shardline.router.kv_follower import KVFollower
from shardline.server.errors import interrupted
from shardline.server.keys import ApiKeys
from shardline.server.launch import (
    StopSignals,
    bound_heap,
    make_http_server,
    open_listener,
    reload_handled,
    run_event_loop,
    tune_interpreter,
    url_of,
)
from shardline.server.middleware import InFlight
from shardline.server.tls import check_tls, refresh_tls

logger = logging.getLogger(__name__)


def run_router(config: RouterConfig, server_config: ServerConfig) -> int:
    """Route until SIGTERM, SIGINT or SIGHUP arrives; returns the exit code.

    Raises:
        ValueError: the configuration is at fault, or the router cannot listen on the address.
    """
    configure_logging()
    raise_file_limit()
    bound_heap()
    check_tls(server_config)
    fleet = Fleet(config)
    with contextlib.closing(open_listener(server_config)) as listener:
        return run_event_loop(_serve(fleet, config, server_config, listener))


async def _serve(fleet: Fleet, config: RouterConfig, server_config: ServerConfig, listener: socket.socket) -> int:
    stop = StopSignals(reloads=server_config.api_key_file is not None)
    keys, in_flight = ApiKeys(server_config), InFlight()
    app = create_app(fleet, config, server_config, keys, in_flight)
    server = make_http_server(app, server_config, num_engines=0)
    watching = asyncio.create_task(watch_fleet(fleet, config))
    with stop.handled(), reload_handled(keys.reload, server_config):
        server.config.load()
        refreshing = asyncio.create_task(refresh_tls(server_config, server.config.ssl))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            logger.info(
                "Shardline %s: the router of %d backend(s) runs at %s",
                __version__,
                len(fleet.backends),
                url_of(listener, server_config),
            )
            tune_interpreter()
            await stop.first.wait()
            emptied = asyncio.create_task(in_flight.wait_empty(server_config.shutdown_timeout))
            hurried = asyncio.create_task(stop.second.wait())
            await asyncio.wait({emptied, hurried}, return_when=asyncio.FIRST_COMPLETED)
            for task in (emptied, hurried):
                task.cancel()
            ended = in_flight.interrupt(interrupted())
            if ended:
                logger.warning("ended %d request(s) that had not finished", ended)
            return 0
        finally:
            watching.cancel()
            refreshing.cancel()
            server.should_exit = True
            await asyncio.gather(serving, watching, refreshing, return_exceptions=True)
            fleet.close()


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
