"""The KV-state coordinator as a Serve deployment of one replica: streams and a clock around `CoordinatorCore`."""

import asyncio
import dataclasses
import logging
import os
import time

from cluster.stream import Stream
from cluster.transport import serve
from deployments.streams import Callbacks, endpoint, new_generation, node_address
from kvstate.coordinator import CoordinatorCore, FromReplica, FromRouter, Outgoing, RegistrationError
from kvstate.protocol import AnyMessage, Register
from kvstate.sequence import ConflictingCommit

log = logging.getLogger(__name__)

TICK_S = 0.05


class KVCoordinator:
    """Replicas and routers dial it; nothing it does is waited for by a round."""

    # mypy knows no async constructor; Serve awaits it.
    async def __init__(self, models: list[str], max_waiting: int, lease_s: float, token_env: str | None) -> None:  # type: ignore[misc]
        self._core = CoordinatorCore(models, max_waiting=max_waiting, lease_s=lease_s)
        self._streams: dict[tuple[str, str], Stream] = {}
        self._server = await serve(
            endpoint("coordinator", "coordinator", token_env, new_generation()), node_address(), 0, self._accept
        )
        self._address = f"{node_address()}:{self._server.port}"
        self._ticking = asyncio.create_task(self._tick())

    async def endpoint(self) -> str:
        """host:port of its gRPC server."""
        return self._address

    async def pid(self) -> int:
        return os.getpid()

    async def lags(self) -> list[dict[str, object]]:
        """Holders that have not acknowledged all that is committed; empty when every holder has."""
        lags = self._core.lags(time.monotonic())
        return [dataclasses.asdict(lag) for lag in lags]

    async def sequences(self) -> dict[int, dict[str, int]]:
        """Per running sequence: the committed length each holder has acknowledged, by model."""
        running = self._core.ledger.running
        return {seq: {m: h.acked_len for m, h in entry.holders.items()} for seq, entry in running.items()}

    async def registered(self) -> list[str]:
        return [member.info.model for member in self._core.ledger.members() if member.up]

    def _accept(self, stream: Stream) -> Callbacks:
        name = stream.peer.id
        if stream.peer.role == "router":
            self._streams["router", name] = stream
            self._send(self._core.router_connected(name, time.monotonic()))
            return Callbacks(lambda m: self._from_router(stream, m), lambda: self._router_gone(name, stream))
        return Callbacks(lambda m: self._from_replica(stream, m), lambda: self._replica_gone(stream))

    def _from_router(self, stream: Stream, message: AnyMessage) -> None:
        name = stream.peer.id
        if not isinstance(message, FromRouter):
            self._refuse(stream, message)
            return
        try:
            self._send(self._core.on_router(name, message, time.monotonic()))
        except ConflictingCommit:
            log.exception("router %s contradicts what it committed", name)

    def _from_replica(self, stream: Stream, message: AnyMessage) -> None:
        name = stream.peer.id
        if not isinstance(message, FromReplica):
            self._refuse(stream, message)
            return
        if isinstance(message, Register):
            self._streams["replica", name] = stream
        try:
            self._send(self._core.on_replica(name, message, time.monotonic()))
        except RegistrationError as error:
            log.warning("replica %s is refused: %s", name, error)
            stream.close(str(error))

    def _refuse(self, stream: Stream, message: AnyMessage) -> None:
        reason = f"a {stream.peer.role} does not send {type(message).__name__} to the coordinator"
        log.warning("stream of %s is closed: %s", stream.peer.id, reason)
        stream.close(reason)

    def _router_gone(self, name: str, stream: Stream) -> None:
        if self._streams.get(("router", name)) is stream:
            del self._streams["router", name]
            self._send(self._core.router_lost(name, time.monotonic()))

    def _replica_gone(self, stream: Stream) -> None:
        """Only the stream of the latest registration speaks for a replica."""
        name = stream.peer.id
        if self._streams.get(("replica", name)) is stream:
            del self._streams["replica", name]
            self._send(self._core.replica_lost(name, time.monotonic()))

    def _send(self, messages: list[Outgoing]) -> None:
        for outgoing in messages:
            stream = self._streams.get((outgoing.to_kind, outgoing.to_id))
            if stream is not None:
                stream.send(outgoing.message)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._send(self._core.tick(time.monotonic()))
