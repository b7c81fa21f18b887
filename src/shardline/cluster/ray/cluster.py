"""A Ray cluster: its hosts, reservations on them, and actors that start node processes. Only this file uses Ray.

Ray pickles what it sends to actors, and its processes listen on all addresses. So an actor gets one message when its
node starts, and steps travel on channels of our own.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from shardline import env
from shardline.cluster.ray.node import NodeStarter
from shardline.cluster.ray.placing import Demand, RayHost

_CONNECT_SECONDS = 3.0
_CALL_SECONDS = 3.0
_START_SECONDS = 60.0
"""An actor is a new Python process, perhaps on a busy host."""
_RESERVE_SECONDS = 10.0
_NOT_RUNNING = "Could not find any running Ray instance"

_log = logging.getLogger(__name__)


class Unreachable(Exception):
    """A host of the Ray cluster does not answer."""


class RayCluster:
    """The Ray cluster at RAY_ADDRESS, else the one that was started on this host, else a new one for this process."""

    def __init__(self) -> None:
        """Connect.

        Raises:
            ValueError: Ray cannot be joined; the message says why.
        """
        address = env.ray_address()
        asks_for_token = _asks_for_token(address, "unset RAY_ADDRESS") if address else None
        if asks_for_token:
            env.adopt_ray_token_auth()
        import ray

        # `ray.init` would try for minutes to join a cluster that has ended without a word to this host.
        if not address and (last := _last_cluster()):
            asks_for_token = _asks_for_token(last, "`ray stop --force` here, so that this host forgets that one")
        try:
            ray.init(address=address or "auto", configure_logging=False)
        except _errors(ray) as error:
            if address or _NOT_RUNNING not in str(error):
                raise ValueError(
                    f"the Ray cluster at {address or 'this host'} cannot be joined: {_cause(error)}"
                ) from error
            _start_cluster(ray)
            asks_for_token = True
        if not asks_for_token:
            _log.warning(
                "this Ray cluster asks for no token: who reaches it can run any code on its nodes. Set "
                "RAY_AUTH_MODE=token for every `ray start`, and keep its ports on a private network"
            )
        self._ray = ray
        self.own_id: str = ray.get_runtime_context().get_node_id()

    def hosts(self) -> list[RayHost]:
        """The hosts that Ray takes for living.

        Raises:
            Unreachable: Ray does not answer.
        """
        from ray._private.state import available_resources_per_node

        try:
            free, nodes = available_resources_per_node(), self._ray.nodes()
        except (OSError, RuntimeError, self._ray.exceptions.RayError) as error:
            raise Unreachable(f"Ray does not answer: {error}") from error
        return [
            RayHost(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
            for node in nodes
            if node["Alive"]
        ]

    def reserve(self, host: RayHost, demand: Demand, num_groups: int) -> Reservation:
        """Reserve one bundle for each group on a host.

        Raises:
            Unreachable: Ray did not get it done within some seconds.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        bundles = [{demand.resource: demand.amount, f"node:{host.address}": 0.001} for _ in range(num_groups)]
        group = placement_group(bundles, strategy="STRICT_PACK")
        if not group.wait(_RESERVE_SECONDS):
            remove_placement_group(group)
            raise Unreachable(f"Ray did not reserve {num_groups} bundles on {host.address}")
        return Reservation(self._ray, host, demand, group)

    def close(self) -> None:
        """End all actors, and the cluster if this process has started it."""
        self._ray.shutdown()


class Reservation:
    def __init__(self, ray: Any, host: RayHost, demand: Demand, group: Any) -> None:
        self._ray = ray
        self.host = host
        self._demand = demand
        self._group = group
        self._actors: list[Any] = []
        """One; or one in each bundle, if bundles have GPUs, since Ray gives GPUs to actors."""

    def gpus(self) -> str | None:
        """CUDA_VISIBLE_DEVICES for the reserved GPUs; None: no GPUs are reserved.

        Raises:
            Unreachable: the host does not answer.
        """
        if self._demand.resource == "CPU":
            return None
        parts = self._call([actor.gpus.remote() for actor in self._starters()], _START_SECONDS)
        return ",".join(gpu for part in parts for gpu in part)

    def start_node(self, message: bytes) -> None:
        """Start the host's node process, or start it again; `message` is an encoded StartNode.

        Raises:
            Unreachable: the host does not answer, or Shardline cannot be imported there.
        """
        gpus = self.gpus()
        self._call([self._starters()[0].start.remote(message, gpus)], _START_SECONDS)

    def find_node_end(self) -> tuple[int, str] | None:
        """The exit code of the node process and the last line of its log; None while it runs.

        Raises:
            Unreachable: the host or the actor does not answer.
        """
        end: tuple[int, str] | None = self._call([self._starters()[0].find_end.remote()], _CALL_SECONDS)[0]
        return end

    def release(self) -> None:
        """Give the bundles back. Processes in them are killed if they still run."""
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # Ray may be gone
            for actor in self._actors:
                self._ray.kill(actor)
            remove_placement_group(self._group)
        self._actors = []

    def _starters(self) -> list[Any]:
        if not self._actors:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            gpus = self._demand.amount if self._demand.resource == "GPU" else 0
            remote = self._ray.remote(num_cpus=0, num_gpus=gpus)(NodeStarter)
            self._actors = [
                remote.options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=index
                    )
                ).remote()
                for index in range(len(self._group.bundle_specs) if gpus else 1)
            ]
        return self._actors

    def _call(self, calls: list[Any], seconds: float) -> list[Any]:
        errors = self._ray.exceptions
        try:
            results: list[Any] = self._ray.get(calls, timeout=seconds)
            return results
        except errors.GetTimeoutError as error:
            raise Unreachable(f"{self.host.address} does not answer") from error
        except errors.RayError as error:
            words = str(error).strip().splitlines()[-1]
            raise Unreachable(f"the actor on {self.host.address} has ended: {words}") from error


def _start_cluster(ray: Any) -> None:
    """Start a Ray cluster for this process; Ray itself turns on its token, if RAY_AUTH_MODE is not set.

    Raises:
        ValueError: it cannot be started.
    """
    try:
        ray.init(address="local", include_dashboard=False, configure_logging=False)
    except _errors(ray) as error:
        raise ValueError(
            f"no Ray cluster runs on this host, and none can be started: {_cause(error)}; start one with "
            "`ray start --head`, or set RAY_ADDRESS to the HOST:PORT of one"
        ) from error
    _log.info("no Ray cluster runs here, so one was started for this host alone; it asks for a token")


def _errors(ray: Any) -> tuple[type[Exception], ...]:
    """What `ray.init` raises."""
    return OSError, RuntimeError, ValueError, ray.exceptions.RayError


def _cause(error: Exception) -> str:
    """The last line of an error: Ray quotes whole stacks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _last_cluster() -> str | None:
    """The address of the cluster that `ray start` joined or began on this host last; None: there was none."""
    from ray._private.services import get_ray_address_from_environment

    try:
        address: str = get_ray_address_from_environment("auto", None)
    except ConnectionError:
        return None
    return address


def _asks_for_token(address: str, otherwise: str) -> bool:
    """Whether a Ray cluster refuses those who show no token. `otherwise`: what to do if there is to be no cluster.

    Raises:
        ValueError: nothing answers at the address, or it is no such address.
    """
    import grpc

    if "://" in address:
        raise ValueError(f"RAY_ADDRESS {address} is for Ray's client; give HOST:PORT, as ray start does")
    if address in ("auto", "local"):
        raise ValueError(f"RAY_ADDRESS is {address!r}; leave it out, or give HOST:PORT")
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/ray.rpc.NodeInfoGcsService/CheckAlive", request_serializer=bytes, response_deserializer=bytes
        )
        try:
            call(b"", timeout=_CONNECT_SECONDS)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise ValueError(
                f"no Ray cluster answers at {address} ({error.code().name.lower()}); start one with "
                f"`ray start --head`, or {otherwise}"
            ) from error
    return False
