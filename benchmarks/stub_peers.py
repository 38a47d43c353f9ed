"""Whom a router talks to, played cheaply: a coordinator, replicas and an ingress, to measure the router alone.

A replica serves all that waits for it in one batch, which takes its model's time and computes nothing: a sample is 1
(right) or 0, and models err together, as `errors: shared` in docs. `play` runs them all in a process of their own, over
the real transport.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import uvloop

from benchmarks.stopwatch import Stopwatch
from cluster.stream import Stream
from cluster.transport import Endpoint, dial, serve
from deployments.streams import Callbacks
from kvstate.protocol import (
    Admit,
    Admitted,
    AnyMessage,
    Check,
    Delivered,
    Draft,
    Drafted,
    Failed,
    Member,
    Members,
    Message,
    OpenRequest,
    Probe,
    Probed,
    Profile,
    ReplicaInfo,
    Sampling,
    Step,
    StepReply,
    Timing,
    Verdict,
)

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 512
HOST = "127.0.0.1"
Send = Callable[[AnyMessage], object]


@dataclass(frozen=True, slots=True)
class StubModel:
    name: str
    base_ms: float
    agreement: float

    def sample(self, seq: int, position: int) -> int:
        hashed = ((seq * 0x9E3779B1 ^ position * 0x85EBCA77) * 0xC2B2AE3D) & 0xFFFFFFFF
        return int((hashed ^ hashed >> 15) < self.agreement * 2**32)


PACE = 300
"""So many sequences are served at the models' own pace, n times as many n times slower: the router is never behind,
which would show as time of hops and shorten the chains.
"""

MODELS = (StubModel("small", 1.0, 0.75), StubModel("middle", 10.0, 0.95), StubModel("target", 60.0, 1.0))


class StubReplica:
    """Serves what waits in one batch, answers it through `send`, takes the next."""

    def __init__(self, model: StubModel, name: str, watch: Stopwatch) -> None:
        self.model = model
        self.name = name
        self._watch = watch
        self.send: Send = lambda _: None
        self._waiting: list[tuple[Step, float]] = []
        self._is_busy = False
        self._loop = asyncio.get_running_loop()

    def member(self, address: str) -> Member:
        profile = Profile(self.model.base_ms)
        info = ReplicaInfo(self.name, self.model.name, "here", address, "stub", 1 << 20, 16, 1 << 20, profile)
        return Member(info, up=True, sequences=0, free_blocks=1 << 20)

    def take(self, message: Message) -> None:
        if isinstance(message, Draft | Check | Probe):
            self._waiting.append((message, self._loop.time()))
            if not self._is_busy:
                self._begin()

    def _begin(self) -> None:
        """At the end of this tick: messages of one frame share the batch."""
        self._is_busy = True
        self._loop.call_soon(self._run_batch)

    def _run_batch(self) -> None:
        with self._watch:
            steps, self._waiting = self._waiting, []
            now_s = self._loop.time()
            num_batches = max(_num_batches(step) for step, _ in steps)
            replies = [self._reply(step, len(steps), now_s - came_s) for step, came_s in steps]
        self._loop.call_later(num_batches * self.model.base_ms / 1e3, self._end_batch, replies)

    def _end_batch(self, replies: Sequence[StepReply]) -> None:
        with self._watch:
            self._is_busy = False
            for reply in replies:
                self.send(reply)
        if self._waiting:
            self._begin()

    def _reply(self, step: Step, sharing: int, queue_s: float) -> StepReply:
        seq, key, known, kv_len = step.seq, step.key, step.committed_len, step.from_len + len(step.tokens)
        batches = _num_batches(step)
        timing = Timing(batches, batches * sharing, batches * sharing, batches * self.model.base_ms / 1e3, queue_s)
        first = kv_len - (0 if isinstance(step, Draft) else step.count)
        samples = tuple(self.model.sample(seq, first + i) for i in range(step.count))
        match step:
            case Draft():
                return Drafted(seq, key, samples, known, kv_len, timing)
            case Probe():
                return Probed(seq, key, first, samples, known, kv_len, timing)
            case Check(tokens=tokens, count=count):
                checked = tokens[len(tokens) - count :]
                unequal = (i for i in range(count) if samples[i] != checked[i])
                accepted = next(unequal, count)
                own = self.model.sample(seq, first + accepted)
                return Verdict(seq, key, accepted, own, known, first + accepted, timing)


def _num_batches(step: Step) -> int:
    return max(1, step.count) if isinstance(step, Draft) else 1


class StubCoordinator:
    """Assigns holders in turn; knows no room."""

    def __init__(self, replicas: Sequence[StubReplica]) -> None:
        by_model: dict[str, list[str]] = {}
        for replica in replicas:
            by_model.setdefault(replica.model.name, []).append(replica.name)
        self._turns = {model: itertools.cycle(names) for model, names in by_model.items()}

    def answer(self, admit: Admit) -> Admitted:
        return Admitted(admit.seq, {model: next(turn) for model, turn in self._turns.items()})


class StubIngress:
    """Keeps `sequences` requests open: one that ends is followed by another."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._ids = itertools.count()
        self.send: Send = lambda _: None

    def start(self) -> None:
        for _ in range(self._sequences):
            self._open()

    def receive(self, message: Message) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Delivered) and message.finish_reason is not None:
            self._open()

    def _open(self) -> None:
        """Not all of the same length: they end one by one."""
        number = next(self._ids)
        max_tokens = OUTPUT_TOKENS + number * 37 % OUTPUT_TOKENS
        self.send(OpenRequest(str(number), (1,) * PROMPT_TOKENS, Sampling(), max_tokens, (), 300.0))


def make_replicas(count: int, num_sequences: int, watch: Stopwatch) -> list[StubReplica]:
    """Spread over MODELS as evenly as the count allows; `watch` times what they do."""
    slower = max(1.0, num_sequences / PACE)
    paced = [replace(model, base_ms=model.base_ms * slower) for model in MODELS]
    models = itertools.islice(itertools.cycle(paced), count)
    return [StubReplica(model, f"{model.name}-{i}", watch) for i, model in enumerate(models)]


async def play(num_sequences: int, num_replicas: int) -> None:
    """Prints the coordinator's address, reads the router's, and plays until the process is ended."""
    replicas = make_replicas(num_replicas, num_sequences, Stopwatch())
    servers = [
        await serve(Endpoint("replica", replica.name), HOST, 0, partial(_replica_handler, replica))
        for replica in replicas
    ]
    members = [replica.member(f"{HOST}:{server.port}") for replica, server in zip(replicas, servers, strict=True)]
    handler = partial(_coordinator_handler, StubCoordinator(replicas), Members(tuple(members)))
    server = await serve(Endpoint("coordinator", "coordinator", 1), HOST, 0, handler)
    print(f"{HOST}:{server.port}", flush=True)
    router = (await asyncio.to_thread(sys.stdin.readline)).strip()
    ingress = StubIngress(num_sequences)
    stream = await dial(Endpoint("ingress", "ingress"), router, lambda _: Callbacks(ingress.receive, lambda: None))
    ingress.send = stream.send
    ingress.start()
    await stream.closed


def _replica_handler(replica: StubReplica, stream: Stream) -> Callbacks:
    replica.send = stream.send
    return Callbacks(replica.take, lambda: None)


def _coordinator_handler(coordinator: StubCoordinator, members: Members, stream: Stream) -> Callbacks:
    def receive(message: AnyMessage) -> None:
        if isinstance(message, Admit):
            stream.send(coordinator.answer(message))

    stream.send(members)
    return Callbacks(receive, lambda: None)


if __name__ == "__main__":
    uvloop.run(play(int(sys.argv[1]), int(sys.argv[2])))
