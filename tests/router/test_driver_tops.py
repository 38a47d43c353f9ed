"""A driver's rounds and probes over engines of emulated models, each a step away: which distributions come back."""

import asyncio
from collections.abc import Sequence

from kvstate.protocol import Check, Drafted, Message, Need, Probe, Probed, Sampling, Timing, Verdict
from models.emulated import EmulatedBackend, EmulateSpec
from models.engine import Engine
from router.checks import CheckSeen, ProposalsSeen
from router.divergence import DivergenceEstimate
from router.driver import RoundDriver
from router.links import StepCalls
from router.plan import Plan
from router.sequence import Holder, Limits, RunningSequence

PROMPT = list(b"Which letters are likely?")


class Replicas:
    """`Outbound` to engines that answer at once; keeps what was sent."""

    def __init__(self, agreements: dict[str, float]) -> None:
        self.calls = StepCalls(self, 5.0)
        self.sent: list[tuple[str, Message]] = []
        self._engines = {
            name: Engine(EmulatedBackend(name, rank, EmulateSpec(0.0, agreement), 64), self._deliver)
            for rank, (name, agreement) in enumerate(agreements.items())
        }

    def to_replica(self, replica_id: str, message: Message) -> bool:
        self.sent.append((replica_id, message))
        self._engines[replica_id].submit(replica_id, [message])
        while self._engines[replica_id].step():
            pass
        return True

    def to_coordinator(self, message: Message) -> bool:
        raise AssertionError(message)

    def to_ingress(self, ingress_id: str, message: Message) -> bool:
        raise AssertionError(message)

    def _deliver(self, replies: object) -> None:
        assert isinstance(replies, list)
        for _, reply in replies:
            if isinstance(reply, Drafted | Verdict | Probed | Need):
                self.calls.resolve(reply)


class Deaf:
    """An `Observer` that learns nothing."""

    def timing(self, holder: Holder, kind: str, timing: Timing, round_trip_s: float) -> None: ...

    def drafted(self, model: str, num_asked: int, num_drafted: int) -> None: ...

    def checked(self, seen: CheckSeen) -> None: ...

    def proposed(self, seen: ProposalsSeen) -> None: ...

    def turn(self, drafters: Sequence[str], seconds: float) -> None: ...

    def trust(self, drafter: str, stated: float) -> float:
        return stated

    def beside_trust(self) -> float:
        return 1.0

    def turn_deadline_s(self, drafters: Sequence[str]) -> float:
        return 1.0


def drive(replicas: Replicas, num_top: int) -> tuple[RunningSequence, Probed]:
    """The prefill, rounds over draft and target until 160 tokens are committed, and a probe of the middle model."""

    async def run() -> tuple[RunningSequence, Probed]:
        holders = {name: Holder(name, name) for name in ("draft", "middle", "target")}
        running = RunningSequence(1, list(PROMPT), len(PROMPT), Sampling(), holders, num_top=num_top)
        limits = Limits(200, frozenset())
        driver = RoundDriver(running, limits, replicas.calls, replicas, Deaf(), clock=lambda: 0.0)
        await driver.prefill("target", ["draft"])
        while running.output_len < 160:
            await driver.round(Plan(("draft", "target"), (3,), 0.0))
        probed = await driver.probe("middle", 64, 0.0)
        assert probed is not None
        return running, probed

    return asyncio.run(run())


def test_probes_and_some_checks_tell_how_far_models_are_apart() -> None:
    replicas = Replicas({"draft": 0.7, "middle": 0.8, "target": 1.0})
    running, probed = drive(replicas, num_top=16)
    target = running.last_tops(64)
    assert all(not top or top == ((token, 1.0),) for top, token in zip(target, running.tokens[-64:], strict=True))
    num_known = sum(bool(top) for top in target)
    assert 0 < num_known < 64
    estimate = DivergenceEstimate()
    estimate.observe(probed.tops, target)
    equal = [s == t for s, t, top in zip(probed.samples, running.tokens[-64:], target, strict=True) if top]
    assert estimate.samples == num_known
    assert estimate.acceptance is not None
    assert estimate.acceptance.least == estimate.acceptance.most
    assert (estimate.acceptance.middle == 1.0) == all(equal)
    asked = {(name, type(m)) for name, m in replicas.sent if isinstance(m, Check | Probe) and m.num_top}
    assert asked == {("target", Check), ("middle", Probe)}


def test_nothing_is_asked_for_and_kept_without_a_number() -> None:
    replicas = Replicas({"draft": 0.7, "middle": 0.8, "target": 1.0})
    running, probed = drive(replicas, num_top=0)
    assert (running.target_tops, probed.tops) == ({}, ())
