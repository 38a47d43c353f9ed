"""The router without its sockets: requests come in, a task per request drives its rounds, tokens go out.

Called on one event loop. It knows the ingresses, the coordinator and the replicas by name only (`Outbound`). Life of a
request: queued (bounded) → admitted by the coordinator → prefill → rounds → finished; a lost target sends it back to
admission as a new sequence that replaces the old one. Nothing here waits longer than the request's deadline.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from kvstate.protocol import (
    Admit,
    Admitted,
    CancelRequest,
    CutRequest,
    Delivered,
    Drafted,
    Failed,
    FinishReason,
    Member,
    Members,
    Message,
    Need,
    OpenRequest,
    Probed,
    Resume,
    SpecMetrics,
    Verdict,
)
from router.admissions import RETRY_AFTER_S, Admissions, Refused
from router.classes import context_of
from router.commits import Commits
from router.driver import Commit, RoundDriver, TargetLost
from router.learned import NOTHING, Learned
from router.links import Outbound, StepCalls
from router.own_rates import Missing, OwnRates
from router.plan import Plan
from router.planning import NO_PLAN, Planning, RequestObserver
from router.probing import ProbePlan
from router.sequence import Holder, Limits, RunningSequence, TargetCounts
from router.settings import RouterSettings
from router.stats import RouterStats
from router.steps import MOST_BEHIND
from router.subjects import NO_WORDS, words_of
from router.table_view import explain

log = logging.getLogger(__name__)

CONNECT_S = 3.0
ROWS_STEP = 64
NUM_TOP = 16
"""Likeliest tokens that probes state, and some checks, where probes are sent at all."""


@dataclass(slots=True)
class Request:
    """One request of one ingress. `unsent`: commits of which the ingress was not told yet, since `sent_s`."""

    ingress_id: str
    message: OpenRequest
    deadline_s: float
    output: list[int]
    own: OwnRates
    sent_s: float
    unsent: list[Commit] = field(default_factory=list)
    counts: TargetCounts = field(default_factory=TargetCounts)
    chain: tuple[str, ...] = ()
    plan: Plan = NO_PLAN
    sequence: RunningSequence | None = None
    task: asyncio.Task[None] | None = None
    cut_len: int | None = None
    probes: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def arrived_s(self) -> float:
        return self.deadline_s - self.message.deadline_s


class RouterCore:
    """All requests of one app. `generation` keeps its sequence ids apart from those of earlier routers, `learned` is
    what they knew; `driver` drives the rounds of each request.
    """

    def __init__(
        self,
        settings: RouterSettings,
        outbound: Outbound,
        *,
        generation: int,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
        learned: Learned = NOTHING,
        driver: type[RoundDriver] = RoundDriver,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._outbound = outbound
        self._generation = generation
        self._clock = clock
        self._ids = itertools.count(generation << 20)
        self._requests: dict[str, Request] = {}
        self._admissions = Admissions(outbound, settings.max_queue, clock)
        self._commits = Commits(outbound)
        self._calls = StepCalls(outbound, settings.step_timeout_s)
        self._connected: set[str] = set()
        self._connections = asyncio.Event()
        self._members: dict[str, Member] = {}
        self.stats = RouterStats()
        self.planning = Planning(settings, clock, self.stats, work_clock=work_clock, learned=learned)

    # ------------------------------------------------------------------------------------------------ what comes in

    def on_ingress(self, ingress_id: str, message: Message) -> None:
        match message:
            case OpenRequest():
                self._open(ingress_id, message)
            case CutRequest(request_id, output_len) if request_id in self._requests:
                self._requests[request_id].cut_len = output_len
                self._cancel(request_id)
            case CancelRequest(request_id):
                self._cancel(request_id)

    def ingress_lost(self, ingress_id: str) -> None:
        """Its clients' connections broke with it, or it will re-open them as new requests."""
        for request_id in [r for r, request in self._requests.items() if request.ingress_id == ingress_id]:
            self._cancel(request_id)

    def on_replica(self, message: Message) -> None:
        """A reply of any replica; sequence and key say which step it answers."""
        if isinstance(message, Drafted | Verdict | Probed | Need):
            self._calls.resolve(message)

    def replica_connected(self, replica_id: str) -> None:
        member = self._members.get(replica_id)
        if member is not None and replica_id not in self._connected:
            self.planning.replicas.joined(member.info.model, replica_id)
        self._connected.add(replica_id)
        self._connections.set()

    def replica_lost(self, replica_id: str) -> None:
        """Steps under way there end with ReplicaLost. Its stream and the membership both tell; it counts once.

        No sequence goes on there, should it come back: the coordinator knows of no copy there any more.
        """
        self._calls.fail(replica_id)
        for request in self._requests.values():
            if request.sequence is not None:
                request.sequence.forget(replica_id)
        if replica_id not in self._connected:
            return
        self._connected.remove(replica_id)
        member = self._members.get(replica_id)
        if member is not None:
            self.stats.replica_losses[member.info.model] += 1
            self.planning.table.remove_replica(member.info.model, replica_id)
            self.planning.replicas.lost(member.info.model, replica_id)

    def on_coordinator(self, message: Message) -> None:
        match message:
            case Admitted():
                self._admissions.answered(message)
            case Members(members=members):
                self._update_members(members)

    def coordinator_connected(self) -> None:
        """Tell a new or returned coordinator what runs, what ended meanwhile and what waits, in that order."""
        for request in self._requests.values():
            if request.sequence is not None:
                self._commits.forget(request.sequence.seq)
                self._outbound.to_coordinator(self._resume(request.sequence, request.message.max_tokens))
        self._admissions.coordinator_connected()

    def coordinator_lost(self) -> None:
        """Running rounds go on; openings wait."""

    async def close(self) -> None:
        """Cancel every request and wait until they are gone."""
        tasks = [r.task for r in self._requests.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- what is shown

    @property
    def num_open(self) -> int:
        return sum(request.sequence is not None for request in self._requests.values())

    @property
    def num_queued(self) -> int:
        return len(self._requests) - self.num_open

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def can_serve(self) -> bool:
        return any(m.up and m.info.model == self._settings.target for m in self._members.values())

    def change(self, settings: RouterSettings) -> None:
        """Other settings for the same models, from the next round of each request on."""
        self.planning.change(settings)
        self._settings = settings

    def table(self) -> dict[str, object]:
        """GET /router/table."""
        shown = explain(self.planning, self.members, self.can_serve)
        return {"generation": self._generation, "settings": asdict(self._settings), **shown}

    # --------------------------------------------------------------------------------------------------- one request

    def _open(self, ingress_id: str, message: OpenRequest) -> None:
        words = words_of(message.prompt) if self._settings.has_alternatives else NO_WORDS
        own = OwnRates(context_of(message.request_class, message.sampling), words)
        now = self._clock()
        request = Request(ingress_id, message, now + message.deadline_s, list(message.delivered), own, now)
        if message.delivered:
            self.stats.resumed_requests["router_lost"] += 1
        self._requests[message.request_id] = request
        request.task = asyncio.create_task(self._serve(request), name=f"request {message.request_id}")
        # Not at the end of the task: one that is cancelled before its first step never runs a line.
        request.task.add_done_callback(lambda _: self._requests.pop(message.request_id, None))

    def _cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.task is not None:
            request.task.cancel()

    async def _serve(self, request: Request) -> None:
        try:
            async with asyncio.timeout(max(0.0, request.deadline_s - self._clock())):
                await self._run(request)
            self.stats.requests["completed"] += 1
        except TimeoutError:
            self._fail(request, _too_late(request))
        except Refused as refused:
            self._fail(request, refused)
        except Exception:
            log.exception("request %s failed", request.message.request_id)
            self._fail(request, Refused(500, "internal error"))
        except asyncio.CancelledError:
            self.stats.requests["cut" if request.cut_len is not None else "cancelled"] += 1
            if request.cut_len is not None:
                self._send_end(request)
        finally:
            self.planning.record_request(request.own)

    async def _run(self, request: Request) -> None:
        replaces: int | None = None
        while True:
            request.sequence = sequence = await self._admitted(request, replaces)
            placed = {model: holder.replica_id for model, holder in sequence.holders.items()}
            self.planning.replicas.opened(placed, request.message.prompt)
            try:
                await self._until_connected(sequence.holders[self._settings.target].replica_id)
                await self._generate(request, sequence)
            except TargetLost:
                self.stats.resumed_requests["target_lost"] += 1
                request.sequence, replaces = None, sequence.seq
                continue
            except BaseException:
                self._admissions.finish(sequence.seq)
                raise
            finally:
                self._commits.forget(sequence.seq)
                self.planning.replicas.closed(placed)
            self._admissions.finish(sequence.seq)
            return

    async def _admitted(self, request: Request, replaces: int | None) -> RunningSequence:
        """Waits for room; the caller's deadline bounds it."""
        message = request.message
        seq = next(self._ids)
        models = self.planning.held(message.speculation, request.own)
        preferred = self.planning.replicas.preferred(models, self.planning.snapshot().models, message.prompt)
        expected = {model: ids[0] for model, ids in preferred.items()}
        max_len = len(message.prompt) + message.max_tokens
        admit = Admit(seq, len(message.prompt), max_len, replaces, preferred, models)
        self.planning.replicas.opened(expected, ())  # so that many that come at once do not all go there
        try:
            admitted = await self._admissions.ask(admit)
        finally:
            self.planning.replicas.closed(expected)
        holders = {model: Holder(model, replica_id) for model, replica_id in admitted.holders.items()}
        tokens = [*message.prompt, *request.output]
        num_top = NUM_TOP if message.speculation.mode == "auto" and self._settings.explore > 0.0 else 0
        sampling, logprobs = message.sampling, message.logprobs
        return RunningSequence(seq, tokens, len(message.prompt), sampling, holders, logprobs, num_top=num_top)

    async def _until_connected(self, replica_id: str) -> None:
        """A replica can be admitted to before the stream to it is open. Raises TargetLost when it stays shut."""
        try:
            async with asyncio.timeout(CONNECT_S):
                while replica_id not in self._connected:
                    self._connections.clear()
                    await self._connections.wait()
        except TimeoutError:
            raise TargetLost(replica_id) from None

    async def _generate(self, request: Request, sequence: RunningSequence) -> None:
        limits = Limits(request.message.max_tokens, frozenset(request.message.stop_ids))
        observer = self.planning.observer(request.own)
        driver = self._driver(
            sequence,
            limits,
            self._calls,
            self._outbound,
            observer,
            clock=self._clock,
            counts=request.counts,
        )
        try:
            await self._rounds(request, driver, observer)
        finally:
            driver.stop()
            for probe in request.probes:
                probe.cancel()

    async def _rounds(self, request: Request, driver: RoundDriver, observer: RequestObserver) -> None:
        sequence = driver.sequence
        plan = self._plan(request, sequence, ())
        commit = await driver.prefill(self._settings.target, plan.drafters)
        if not request.output:
            self.stats.first_token_s.add(self._clock() - request.arrived_s)
        self._deliver(request, sequence, commit)
        while commit.finish_reason is None:
            plan = self._plan(request, sequence, self._missing(sequence))
            observer.plan = plan
            self._start_probe(request, driver, plan)
            started_s = self._clock()
            commit = await driver.round(plan)
            request.own.end_round()
            self._count_round(request, plan, self._clock() - started_s, len(commit.tokens))
            self._deliver(request, sequence, commit)

    def _plan(self, request: Request, sequence: RunningSequence, missing: Missing) -> Plan:
        own, target = request.own, self._settings.target
        if target not in sequence.holders:
            raise TargetLost(target)
        self.planning.is_overloaded, self.planning.table.num_open = self._admissions.is_overloaded, len(self._requests)
        speculation = request.message.speculation
        request.plan = plan = self.planning.plan(tuple(sequence.holders), speculation, own, missing, request.plan)
        request.chain = plan.label
        return plan

    def _missing(self, sequence: RunningSequence) -> Missing:
        """Rows in whole ROWS_STEP, so that requests share plans."""
        missing = []
        for holder in sequence.holders.values():
            rows = 0 if holder.is_reading else len(sequence.tokens) - holder.kv_len
            member = self._members.get(holder.replica_id)
            if member is not None and member.info.prompt_tokens:
                rows = min(rows, member.info.prompt_tokens + sequence.output_len)
            if rows > MOST_BEHIND:
                missing.append((holder.model, ROWS_STEP * -(-rows // ROWS_STEP)))
        return tuple(sorted(missing))

    def _count_round(self, request: Request, plan: Plan, seconds: float, num_tokens: int) -> None:
        self.stats.add_round(plan.kind, seconds, num_tokens)
        self.planning.record_round(plan, seconds, num_tokens, request.message.speculation)

    def _deliver(self, request: Request, sequence: RunningSequence, commit: Commit) -> None:
        if not commit.tokens:
            return
        self._commits.add(sequence.seq, sequence.epoch, len(sequence.tokens) - len(commit.tokens), commit.tokens)
        self.stats.committed_tokens += len(commit.tokens)
        request.output.extend(commit.tokens)
        request.unsent.append(commit)
        if commit.finish_reason is not None or self._clock() - request.sent_s >= request.message.gather_s:
            self._send_unsent(request, commit.finish_reason)

    def _send_unsent(self, request: Request, reason: FinishReason | None) -> None:
        tokens = tuple(token for commit in request.unsent for token in commit.tokens)
        logprobs = tuple(stated for commit in request.unsent for stated in commit.logprobs)
        from_index = len(request.output) - len(tokens)
        metrics = self._metrics(request) if reason is not None else None
        request.sent_s, request.unsent = self._clock(), []
        delivered = Delivered(request.message.request_id, from_index, tokens, reason, metrics, logprobs)
        self._outbound.to_ingress(request.ingress_id, delivered)

    def _send_end(self, request: Request) -> None:
        """After a cut by the ingress: no more tokens, the counts."""
        assert request.cut_len is not None
        end = Delivered(request.message.request_id, request.cut_len, (), FinishReason.STOP, self._metrics(request))
        self._outbound.to_ingress(request.ingress_id, end)

    def _metrics(self, request: Request) -> SpecMetrics:
        c = request.counts
        histogram = tuple(c.histogram)
        return SpecMetrics(c.checks, c.draft_tokens, c.accepted, histogram, c.most_draft_tokens, request.chain)

    def _fail(self, request: Request, refused: Refused) -> None:
        self.stats.requests[str(refused.code)] += 1
        message = Failed(request.message.request_id, refused.code, refused.message, retry_after_s=refused.retry_after_s)
        self._outbound.to_ingress(request.ingress_id, message)

    # ----------------------------------------------------------------------------------------- probes and membership

    def _start_probe(self, request: Request, driver: RoundDriver, plan: Plan) -> None:
        sequence = driver.sequence
        speculation = request.message.speculation
        probe = self.planning.choose_probe(tuple(sequence.holders), plan, sequence.output_len, speculation, request.own)
        if probe is not None:
            self.stats.probes += 1
            task = asyncio.create_task(self._probe(request.own, driver, probe))
            request.probes.add(task)
            task.add_done_callback(request.probes.discard)

    async def _probe(self, own: OwnRates, driver: RoundDriver, probe: ProbePlan) -> None:
        """Samples at the last committed positions, beside the round; never delays it and never fails it."""
        committed, tops = driver.sequence.tokens[-probe.count :], driver.sequence.last_tops(probe.count)
        asked = await asyncio.gather(*(driver.probe(m, probe.count, probe.stop_below) for m in probe.models))
        replies = {model: reply for model, reply in zip(probe.models, asked, strict=True) if reply is not None}
        self.planning.record_probe(sum(reply.timing.busy_s for reply in replies.values()))
        samples = {model: reply.samples for model, reply in replies.items()}
        stated = {model: reply.tops for model, reply in replies.items() if reply.tops}
        self.planning.probed(samples, committed, own, {**stated, self._settings.target: tops})

    def _update_members(self, members: tuple[Member, ...]) -> None:
        for member in members:
            if member.up:
                self.planning.add_model(member.info.model, member.info.profile)
        self._members = {member.info.replica_id: member for member in members}
        serving: dict[str, list[str]] = {}
        for replica_id, member in self._members.items():
            if replica_id in self._connected:
                serving.setdefault(member.info.model, []).append(replica_id)
        self.planning.replicas.serving = serving
        self.stats.add_replica_counts(members)

    def _resume(self, sequence: RunningSequence, max_tokens: int) -> Resume:
        holders = {model: holder.replica_id for model, holder in sequence.holders.items()}
        max_len = sequence.prompt_len + max_tokens
        return Resume(sequence.seq, sequence.epoch, tuple(sequence.tokens), max_len, holders)


def _too_late(request: Request) -> Refused:
    if request.sequence is None:
        return Refused(503, "no target replica had room before the deadline", RETRY_AFTER_S)
    limit = f"{request.message.deadline_s:g} s"
    return Refused(408, f"not done within its deadline of {limit}: ask for fewer tokens, or raise http.deadline_s")
