"""One replica of one model: an engine in its own thread, a gRPC server for the router, a stream to the coordinator."""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from msgspec.structs import replace
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import AnyModel, AppConfig, EmulatedModel, TransformersModel, parse_config, parse_emulate
from cluster.config_errors import ConfigError
from cluster.dialer import Dialer
from cluster.priority import come_first
from cluster.stream import Stream
from cluster.transport import serve as serve_streams
from deployments.backends import build_backend, emulate_spec
from deployments.streams import Callbacks, endpoint, node_address
from kvstate.protocol import AnyMessage, Profile, Register, ReplicaInfo
from models.backend import Backend
from models.emulated import EmulatedBackend
from models.engine import Engine, InboxFull, UnknownMessage

log = logging.getLogger(__name__)

REPORT_S = 1.0
CONTROL_S = 30.0


class EngineError(Exception):
    """The engine's thread ended: Serve restarts the replica."""


class ModelReplica:
    """Serve starts it, asks after its health and restarts it; tokens pass over gRPC only."""

    # mypy knows no async constructor; Serve awaits it.
    async def __init__(self, data: Mapping[str, object], model: str, coordinator: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        come_first()
        config = parse_config(data, str(data.get("name", "app")))
        self._model = next(m for m in config.models if m.name == model)
        self._is_target = config.target.name == model
        self._loop = asyncio.get_running_loop()
        ready: Future[tuple[Backend, Engine, Profile]] = Future()
        self._thread = threading.Thread(target=self._compute, args=(config, ready), name="engine", daemon=True)
        self._thread.start()
        self._backend, self._engine, profile = await asyncio.wrap_future(ready)
        await self._connect(config, coordinator, profile)

    def _compute(self, config: AppConfig, ready: "Future[tuple[Backend, Engine, Profile]]") -> None:
        """Everything that computes with the model, loading included, on this one thread.

        OpenMP keeps workers for each thread that ever started some; once there are more than processors, all of them
        sleep between two products.
        """
        try:
            backend = build_backend(config, self._model.name, on_own_thread=True)
            engine = Engine(
                backend,
                self._deliver,
                lease_s=config.kv.lease_s,
                prefix_cache=config.kv.prefix_cache,
                prompt_tokens=_prompt_tokens(self._model),
            )
            ready.set_result((backend, engine, engine.profile()))
        except BaseException as error:
            ready.set_exception(error)
            raise
        engine.run()

    async def _connect(self, config: AppConfig, coordinator: DeploymentHandle[Any], profile: Profile) -> None:
        replica_id = serve.get_replica_context().replica_tag
        own = self._own = endpoint("replica", replica_id, config.security.stream_token_env)
        self._server = await serve_streams(own, node_address(), 0, self._accept)
        self._info = _describe(self._backend, replica_id, self._model, f"{node_address()}:{self._server.port}", profile)
        self._dialer = Dialer(own, coordinator.endpoint.remote, self._register)
        self._dialer.start()
        self._reporting = asyncio.create_task(self._report())

    async def pid(self) -> int:
        return os.getpid()

    async def num_sequences(self) -> int:
        """How many sequences the engine holds now."""
        answer: asyncio.Future[int] = self._loop.create_future()

        def tell(held: int) -> None:
            if not answer.done():
                answer.set_result(held)

        def count() -> None:
            self._loop.call_soon_threadsafe(tell, len(self._engine.held()))

        self._engine.control(count)
        async with asyncio.timeout(CONTROL_S):
            return await answer

    async def stats(self) -> dict[str, int]:
        """Counts of the engine (`EngineStats`), for benchmarks."""
        stats = self._engine.stats
        return {name: getattr(stats, name) for name in stats.__slots__}

    def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """`emulate:` values changed while it runs. Wrong ones are logged and change nothing: a replica that failed for
        them would be taken down.
        """
        if not user_config:
            return
        assert isinstance(self._backend, EmulatedBackend), "only emulated models have a user_config"
        assert isinstance(self._model, EmulatedModel)
        values = {**self._model.emulate.model_dump(), **user_config}
        try:
            spec = emulate_spec(parse_emulate(values, self._model.name, self._is_target))
        except ConfigError as error:
            log.error("user_config of %s is not taken over: %s", self._model.name, error)  # noqa: TRY400
            return
        backend = self._backend
        self._engine.control(lambda: backend.update(spec))

    def check_health(self) -> None:
        if not self._thread.is_alive():
            raise EngineError(f"the engine of {self._model.name} has stopped")

    # ------------------------------------------------------------------------------------------------------- streams

    def _accept(self, stream: Stream) -> Callbacks:
        return Callbacks(lambda message: self._submit(stream, message), lambda: None)

    def _register(self, stream: Stream) -> Callbacks:
        """The coordinator, reached for the first time or again: say who this is and what it holds."""
        self._engine.control(lambda: self._deliver([(stream, Register(self._info, self._engine.held()))]))
        return Callbacks(lambda message: self._submit(stream, message), lambda: None)

    def _submit(self, stream: Stream, message: AnyMessage) -> None:
        try:
            self._engine.submit(stream, [message])
        except (InboxFull, UnknownMessage) as error:
            log.warning("closing the stream of %s: %s %s", stream.peer.id, type(error).__name__, error)
            stream.break_off(type(error).__name__)

    def _deliver(self, replies: Sequence[tuple[object, AnyMessage]]) -> None:
        """Called on the engine's thread, once per step."""
        self._loop.call_soon_threadsafe(_send_all, list(replies))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            stream = self._dialer.stream
            if stream is not None and stream.is_open:
                self._engine.control(partial(self._send_report, stream))

    def _send_report(self, stream: Stream) -> None:
        """On the engine's thread."""
        report = self._engine.report()
        counts = replace(report.counts, bad_frames=dict(self._own.stats.bad_frames))
        self._deliver([(stream, replace(report, counts=counts))])


def _send_all(replies: Sequence[tuple[object, AnyMessage]]) -> None:
    for stream, message in replies:
        assert isinstance(stream, Stream)
        stream.send(message)


def _describe(backend: Backend, replica_id: str, model: AnyModel, address: str, profile: Profile) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id,
        model.name,
        node_address(),
        address,
        backend.vocabulary,
        backend.context_len,
        backend.block_tokens,
        backend.num_blocks,
        profile,
        _prompt_tokens(model) or 0,
    )


def _prompt_tokens(model: AnyModel) -> int | None:
    return model.prompt_tokens if isinstance(model, TransformersModel) else None
