"""The router as a Serve deployment of one replica: streams around `RouterCore`."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.config import AppConfig, parse_config
from cluster.config_errors import ConfigError
from cluster.dialer import Dialer
from cluster.priority import come_first
from cluster.stream import Stream
from cluster.transport import MakeHandler, RefusedError, serve
from deployments.memory import Memory, memory_path
from deployments.metrics import RouterMetrics
from deployments.streams import Callbacks, endpoint, new_generation, node_address
from kvstate.protocol import AnyMessage, Members
from router.learned import NOTHING
from router.service import RouterCore
from router.settings import RouterSettings

log = logging.getLogger(__name__)


def settings_of(config: AppConfig) -> RouterSettings:
    names = [model.name for model in config.models]
    return RouterSettings(
        models=tuple(names),
        levels=tuple(config.levels[name] for name in names),
        policy=config.router.policy,
        chain=config.fixed_chain or (),
        windows=config.router.windows or (),
        explore=config.router.explore,
        max_window=config.router.max_window,
        slo_ms_per_token=config.router.slo_ms_per_token,
        cooperate=config.router.cooperate,
        draft_ahead=config.router.draft_ahead,
        tree_nodes=config.router.tree_nodes,
        max_queue=config.http.max_queue,
    )


def changed_settings(data: Mapping[str, Any], user_config: Mapping[str, Any]) -> RouterSettings:
    """Of an app's config, with other values in its section `router`. Raises ConfigError."""
    if "remember" in user_config:
        raise ConfigError("router.remember", "cannot change while the app runs: set it in the config file")
    given = {**data, "router": {**data.get("router", {}), **user_config}}
    return settings_of(parse_config(given, str(given.get("name", "app"))))


class Router:
    """Ingresses dial it; it dials the coordinator and every replica that the coordinator names."""

    # mypy knows no async constructor; Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, data: Mapping[str, Any], coordinator: DeploymentHandle[Any]
    ) -> None:
        come_first()
        generation = new_generation()
        self._data = data
        config = parse_config(data, str(data.get("name", "app")))
        token_env = config.security.stream_token_env
        self._own = endpoint("router", f"router-{generation}", token_env, generation)
        self._ingresses: dict[str, Stream] = {}
        self._replicas: dict[str, Dialer] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._outdated: RefusedError | None = None
        self._refused_change: str | None = None
        memory = Memory(memory_path(config)) if config.router.remember else None
        learned = NOTHING if memory is None else await asyncio.to_thread(memory.read)
        self._core = RouterCore(settings_of(config), self, generation=generation, learned=learned)
        if memory is not None:
            self._saving = asyncio.create_task(memory.keep(self._core))
        self._metrics = RouterMetrics(self._core, self._own.stats.bad_frames)
        self._server = await serve(self._own, node_address(), 0, self._accept)
        self._coordinator = self._dialer(coordinator.endpoint.remote, self._coordinator_stream)
        self._coordinator.start()

    async def endpoint(self) -> str:
        """host:port of its gRPC server."""
        return f"{node_address()}:{self._server.port}"

    async def pid(self) -> int:
        return os.getpid()

    async def table(self) -> dict[str, object]:
        """GET /router/table. `refused_change`: why the last change of settings was not taken over, if it was not."""
        return {**self._core.table(), "refused_change": self._refused_change}

    async def can_serve(self) -> bool:
        return self._core.can_serve

    async def metrics_text(self) -> str:
        """GET /metrics: the whole app's."""
        return self._metrics.text()

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """`router:` values changed while it runs. Wrong ones are logged and change nothing: a router that failed for
        them would take the app with it.
        """
        self._refused_change = None
        try:
            self._core.change(changed_settings(self._data, user_config))
        except ConfigError as error:
            self._refused_change = str(error)
            log.error("user_config of the Router is not taken over: %s", error)  # noqa: TRY400

    def check_health(self) -> None:
        """A router whose generation is refused was overtaken: Serve starts another."""
        if self._outdated is not None:
            raise self._outdated

    # ------------------------------------------------------------------------------------------------------ Outbound

    def to_replica(self, replica_id: str, message: AnyMessage) -> bool:
        dialer = self._replicas.get(replica_id)
        return _send(dialer.stream if dialer is not None else None, message)

    def to_coordinator(self, message: AnyMessage) -> bool:
        return _send(self._coordinator.stream, message)

    def to_ingress(self, ingress_id: str, message: AnyMessage) -> bool:
        return _send(self._ingresses.get(ingress_id), message)

    # ------------------------------------------------------------------------------------------------------- streams

    def _accept(self, stream: Stream) -> Callbacks:
        name = stream.peer.id
        if name in self._ingresses:  # it redialled before its old stream was seen to break
            self._core.ingress_lost(name)
        self._ingresses[name] = stream
        return Callbacks(lambda m: self._core.on_ingress(name, m), lambda: self._ingress_gone(name, stream))

    def _ingress_gone(self, name: str, stream: Stream) -> None:
        if self._ingresses.get(name) is stream:
            del self._ingresses[name]
            self._core.ingress_lost(name)

    def _coordinator_stream(self, _: Stream) -> Callbacks:
        asyncio.get_running_loop().call_soon(self._core.coordinator_connected)
        return Callbacks(self._from_coordinator, self._core.coordinator_lost)

    def _from_coordinator(self, message: AnyMessage) -> None:
        if isinstance(message, Members):
            self._dial_members(message)
        self._core.on_coordinator(message)

    def _dial_members(self, message: Members) -> None:
        """A coordinator that was restarted lists who has registered again so far: a replica that it does not list is
        gone only if its own stream says so too.
        """
        up = {m.info.replica_id: m.info.address for m in message.members if m.up}
        down = {m.info.replica_id for m in message.members if not m.up}
        for replica_id in self._replicas.keys() - up.keys():
            stream = self._replicas[replica_id].stream
            if replica_id in down or stream is None or not stream.is_open:
                stopping = asyncio.create_task(self._replicas.pop(replica_id).stop())
                self._stopping.add(stopping)
                stopping.add_done_callback(self._stopping.discard)
                self._core.replica_lost(replica_id)
        for replica_id in up.keys() - self._replicas.keys():
            self._replicas[replica_id] = self._dial(replica_id, up[replica_id])

    def _dialer(self, resolve: Callable[[], Awaitable[str]], make_handler: MakeHandler) -> Dialer:
        return Dialer(self._own, resolve, make_handler, on_refused=self._refused)

    def _refused(self, error: RefusedError) -> None:
        if error.reason == "generation" and not error.stale_peer:
            self._outdated = error

    def _dial(self, replica_id: str, address: str) -> Dialer:
        async def resolve() -> str:
            return address

        def handler(_: Stream) -> Callbacks:
            asyncio.get_running_loop().call_soon(self._core.replica_connected, replica_id)
            return Callbacks(self._core.on_replica, lambda: self._core.replica_lost(replica_id))

        dialer = self._dialer(resolve, handler)
        dialer.start()
        return dialer


def _send(stream: Stream | None, message: AnyMessage) -> bool:
    if stream is None or not stream.is_open:
        return False
    stream.send(message)
    return True
