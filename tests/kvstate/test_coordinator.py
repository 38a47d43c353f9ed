from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvstate.coordinator import (
    CoordinatorCore,
    FromReplica,
    FromRouter,
    NotRegistered,
    Outgoing,
    UnknownModel,
    VocabularyMismatch,
)
from kvstate.protocol import (
    Acked,
    Admit,
    Admitted,
    Close,
    Closed,
    Commit,
    Committed,
    Finish,
    Held,
    Members,
    Message,
    Profile,
    Register,
    ReplicaInfo,
    Report,
    Resume,
)


class Desk:
    """A coordinator with a clock, and what it sent last by receiver. Integrity is checked after every event."""

    def __init__(self, *, max_waiting: int = 8, lease_s: float = 10.0, gather_s: float = 0.0) -> None:
        limits = {"lease_s": lease_s, "gather_s": gather_s}
        self.core = CoordinatorCore(["drafter", "target"], max_waiting=max_waiting, **limits)
        self.now = 100.0
        self.core.router_connected("router", self.now)

    def register(
        self,
        replica_id: str,
        model: str = "target",
        num_blocks: int = 20,
        context_len: int = 1000,
        held: Sequence[Held] = (),
        vocabulary: str = "bytes",
    ) -> list[Outgoing]:
        info = ReplicaInfo(replica_id, model, "n", "h:1", vocabulary, context_len, 4, num_blocks, Profile(1.0))
        return self.replica(replica_id, Register(info, tuple(held)))

    def replica(self, replica_id: str, message: FromReplica) -> list[Outgoing]:
        return self._checked(self.core.on_replica(replica_id, message, self.now))

    def router(self, message: FromRouter, router_id: str = "router") -> list[Outgoing]:
        return self._checked(self.core.on_router(router_id, message, self.now))

    def tick(self, after_s: float, alive: Sequence[str] = ()) -> list[Outgoing]:
        self.now += after_s
        for replica_id in alive:
            self.replica(replica_id, Report(self.core.ledger.replicas[replica_id].free_blocks, 0))
        return self._checked(self.core.tick(self.now))

    def admit(self, seq: int, max_len: int = 16, prompt_len: int = 3) -> list[Admitted]:
        return admitted(self.router(Admit(seq, prompt_len, max_len)))

    def _checked(self, out: list[Outgoing]) -> list[Outgoing]:
        self.core.check_integrity()
        return out


def to(out: list[Outgoing], receiver: str) -> list[Message]:
    return [o.message for o in out if o.to_id == receiver and not isinstance(o.message, Members)]


def admitted(out: list[Outgoing]) -> list[Admitted]:
    return [o.message for o in out if isinstance(o.message, Admitted)]


def members(out: list[Outgoing]) -> dict[str, bool]:
    (message,) = [o.message for o in out if isinstance(o.message, Members)]
    return {member.info.replica_id: member.up for member in message.members}


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.register("d", "drafter")
    desk.register("t", "target")
    return desk


# ------------------------------------------------------------------------------------------------------- membership


def test_every_change_of_who_is_up_reaches_every_router(desk: Desk) -> None:
    assert members(desk.core.router_connected("second", desk.now)) == {"d": True, "t": True}
    out = desk.core.replica_lost("d", desk.now)
    assert sorted(o.to_id for o in out) == ["router", "second"]
    assert members(out[:1]) == {"d": False, "t": True}
    assert desk.core.replica_lost("d", desk.now) == []
    assert members([o for o in desk.register("d", "drafter") if o.to_id == "second"]) == {"d": True, "t": True}


def test_many_that_come_together_are_told_of_at_once_and_before_any_answer_names_one() -> None:
    desk = Desk(gather_s=0.05)
    told = [desk.register(f"d{i}", "drafter") for i in range(100)]
    assert [len(members(out)) for out in told if out] == [1]
    assert len(members(desk.tick(0.05))) == 100
    assert desk.tick(0.06) == []
    assert members(desk.register("t"))
    assert desk.register("t2", num_blocks=40) == []
    first, second = desk.router(Admit(1, 3, 16))
    assert "t2" in members([first])
    assert admitted([second])[0].holders["target"] == "t2"


def test_a_silent_replica_is_lost_after_its_missed_heartbeats_and_must_register_again(desk: Desk) -> None:
    assert members(desk.tick(2.0, alive=["t"])) == {"d": True, "t": True}
    assert members(desk.tick(1.0, alive=["t"])) == {"d": False, "t": True}
    with pytest.raises(NotRegistered, match="replica d is not registered"):
        desk.replica("d", Report(20, 0))
    desk.register("d", "drafter")
    desk.replica("d", Report(20, 0))


def test_replicas_that_stay_away_are_forgotten(desk: Desk) -> None:
    desk.core.replica_lost("d", desk.now)
    assert members(desk.tick(9.0, alive=["t"])) == {"d": False, "t": True}
    assert members(desk.tick(2.0, alive=["t"])) == {"t": True}


def test_disagreeing_vocabularies_and_unknown_models_are_refused(desk: Desk) -> None:
    with pytest.raises(VocabularyMismatch, match="'drafter' has other, 'drafter' has bytes"):
        desk.register("d2", "drafter", vocabulary="other")
    desk.core.replica_lost("d", desk.now)
    with pytest.raises(UnknownModel, match="'targte'; there are drafter, target"):
        desk.register("x", "targte")
    assert members(desk.tick(1.0, alive=["t"])) == {"d": False, "t": True}


# -------------------------------------------------------------------------------------------------------- admission


def test_admission_names_a_holder_per_model_with_room(desk: Desk) -> None:
    desk.register("t2", "target", num_blocks=40)
    assert desk.admit(1) == [Admitted(1, {"drafter": "d", "target": "t2"})]
    assert desk.admit(1) == [Admitted(1, {"drafter": "d", "target": "t2"})]  # asked again
    assert desk.core.ledger.replicas["t2"].room_blocks == 35


def test_only_models_that_the_router_names_hold_a_sequence_and_the_target(desk: Desk) -> None:
    desk.register("n", "drafter")
    assert admitted(desk.router(Admit(1, 3, 16, models=("target",)))) == [Admitted(1, {"target": "t"})]
    assert admitted(desk.router(Admit(2, 3, 16, models=("drafter",))))[0].holders.keys() == {"drafter", "target"}


def test_a_level_without_room_or_context_is_left_out() -> None:
    desk = Desk()
    desk.register("t", "target")
    desk.register("d", "drafter", context_len=12)
    assert desk.admit(1, max_len=16) == [Admitted(1, {"target": "t"})]
    assert desk.admit(2, max_len=12) == [Admitted(2, {"drafter": "d", "target": "t"})]


def test_what_can_never_fit_is_refused_at_once(desk: Desk) -> None:
    desk.register("long", "target", num_blocks=5, context_len=2000)
    (answer,) = desk.admit(1, max_len=81)
    assert answer.refusal is not None
    assert answer.refusal.startswith("81 tokens of prompt and output fit on no replica of target: shorten")
    assert answer.code == 400
    assert desk.core.num_waiting == 0


def test_waiting_is_first_come_first_served_and_bounded() -> None:
    desk = Desk(max_waiting=2)
    desk.register("t", "target", num_blocks=20)
    assert desk.admit(1, max_len=60) == [Admitted(1, {"target": "t"})]  # 16 of 20 blocks
    assert desk.admit(2, max_len=40) == []
    assert desk.admit(3, max_len=4) == []  # would fit, but is not first
    assert desk.admit(2, max_len=40) == []  # asked again: keeps its place
    (answer,) = desk.admit(4)
    assert (answer.refusal, answer.code) == ("2 requests are waiting for room already", 429)
    assert to(desk.router(Finish(1)), "t") == [Close(1)]
    assert desk.core.num_waiting == 2
    out = desk.replica("t", Closed(1))
    assert [a.seq for a in admitted(out)] == [2, 3]
    assert desk.core.num_waiting == 0


def test_without_a_target_requests_wait_for_one() -> None:
    desk = Desk()
    assert desk.admit(1) == []
    assert desk.admit(2, max_len=500) == []
    answers = admitted(desk.register("t", "target", num_blocks=20))
    assert answers[0] == Admitted(1, {"target": "t"})
    assert answers[1].code == 400


def test_finishing_a_waiting_request_withdraws_it() -> None:
    desk = Desk()
    desk.register("t", "target", num_blocks=20)
    desk.admit(1, max_len=60)
    desk.admit(2, max_len=40)
    desk.admit(3, max_len=4)
    assert admitted(desk.router(Finish(2))) == [Admitted(3, {"target": "t"})]
    (answer,) = desk.admit(2)
    assert answer.refusal == "sequence 2 is closed"


def test_a_report_of_more_room_admits() -> None:
    desk = Desk()
    desk.register("t", "target", num_blocks=20, held=[Held(9, 60, 60)])
    assert desk.admit(1, max_len=40) == []
    assert admitted(desk.replica("t", Report(19, 1))) == [Admitted(1, {"target": "t"})]


def test_a_replaced_sequence_is_closed_before_the_new_one_is_admitted(desk: Desk) -> None:
    desk.admit(1)
    out = desk.router(Admit(2, 3, 16, replaces=1))
    assert [type(m) for m in (o.message for o in out)] == [Close, Close, Admitted]
    (answer,) = desk.admit(1)
    assert answer.refusal == "sequence 1 is closed"


# ---------------------------------------------------------------------------------------------------------- commits


def test_commits_go_to_every_holder_from_where_it_acknowledged(desk: Desk) -> None:
    desk.admit(1)
    out = desk.router(Committed(1, 1, 3, (10, 11)))
    assert to(out, "d") == to(out, "t") == [Commit(1, 1, 3, (10, 11))]
    desk.replica("t", Acked(1, 5, 4))
    out = desk.router(Committed(1, 2, 5, (12,)))
    assert to(out, "t") == [Commit(1, 2, 5, (12,))]
    assert to(out, "d") == [Commit(1, 2, 3, (10, 11, 12))]
    assert not desk.core.converged(1)
    for replica_id in ("d", "t"):
        desk.replica(replica_id, Acked(1, 6, 4))
    assert desk.core.converged(1)
    assert [lag.behind_tokens for lag in desk.core.lags(desk.now)] == [0, 0]


def test_a_repeated_verdict_sends_nothing_to_those_who_know_it(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 0, (1, 2, 3, 10)))  # with the prompt
    for replica_id in ("d", "t"):
        desk.replica(replica_id, Acked(1, 4, 0))
    assert desk.router(Committed(1, 1, 3, (10,))) == []
    assert desk.router(Committed(77, 1, 3, (10,))) == []


def test_laggards_get_the_commit_again_with_growing_pauses(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 3, (10, 11)))
    desk.replica("t", Acked(1, 5, 4))
    sent_s, start_s = [], desk.now
    for _ in range(120):
        out = desk.tick(0.05, alive=["d", "t"])
        assert to(out, "t") == []
        if to(out, "d"):
            assert to(out, "d") == [Commit(1, 1, 3, (10, 11))]
            sent_s.append(round(desk.now - start_s, 2))
    assert sent_s[0] <= 0.15
    pauses = [b - a for a, b in pairwise(sent_s)]
    assert pauses == sorted(pauses)
    assert 1.9 < pauses[-1] < 2.1


def test_a_gap_is_filled_at_once_from_what_the_holder_knows(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 0, (1, 2, 3, 10)))
    assert to(desk.replica("d", Acked(1, 2, 0)), "d") == [Commit(1, 1, 2, (3, 10))]
    assert to(desk.replica("d", Acked(1, 2, 0)), "d") == []


def test_a_lost_copy_is_asked_with_one_token_until_the_router_reopened_it(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 3, (10, 11, 12)))
    assert desk.replica("d", Acked(1, 0, 0, unknown=True)) == []
    assert to(desk.router(Committed(1, 2, 6, (13, 14))), "d") == [Commit(1, 2, 7, (14,))]
    assert to(desk.replica("d", Acked(1, 6, 0)), "d") == [Commit(1, 2, 6, (13, 14))]


def test_a_hole_in_the_verdicts_restarts_the_tokens_behind_it(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 3, (10,)))
    out = desk.router(Committed(1, 3, 6, (13,)))
    assert to(out, "t") == [Commit(1, 3, 6, (13,))]
    assert to(desk.replica("t", Acked(1, 7, 6)), "t") == []
    assert to(desk.replica("d", Acked(1, 4, 4)), "d") == []  # nothing here could help it
    out = desk.router(Resume(1, 3, (1, 2, 3, 10, 11, 12, 13), 16, {"drafter": "d", "target": "t"}))
    assert to(out, "d") == [Commit(1, 3, 4, (11, 12, 13))]


def test_a_dropped_copy_is_offered_its_tokens_again(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 3, (10,)))
    for replica_id in ("d", "t"):
        desk.replica(replica_id, Acked(1, 4, 4))
    desk.replica("d", Report(20, 0, dropped=(1, 55)))
    assert not desk.core.converged(1)
    assert [type(m) for m in to(desk.tick(0.15), "d")] == [Commit]


# ---------------------------------------------------------------------------------------------- closing and failures


def test_closes_are_sent_until_acknowledged_and_keep_the_room_till_then(desk: Desk) -> None:
    desk.admit(1)
    out = desk.router(Finish(1))
    assert to(out, "d") == to(out, "t") == [Close(1)]
    desk.replica("t", Closed(1))
    assert desk.core.ledger.replicas["t"].room_blocks == 20
    assert desk.core.ledger.replicas["d"].room_blocks == 15
    out = desk.tick(0.1)
    assert to(out, "d") == [Close(1)]
    assert to(out, "t") == []
    desk.replica("d", Closed(1))
    assert to(desk.tick(3.0, alive=["d", "t"]), "d") == []


def test_a_lost_replica_counts_as_closed_and_holds_nothing(desk: Desk) -> None:
    desk.admit(1)
    desk.admit(2)
    desk.router(Finish(1))
    desk.core.replica_lost("d", desk.now)
    assert to(desk.tick(0.2), "d") == []
    assert to(desk.router(Committed(2, 1, 3, (10,))), "d") == []
    desk.replica("t", Acked(2, 4, 3))
    assert desk.core.converged(2)


def test_what_a_returning_replica_holds_is_taken_up_closed_or_watched(desk: Desk) -> None:
    desk.admit(1)
    desk.admit(2)
    desk.router(Committed(1, 1, 3, (10, 11)))
    desk.core.replica_lost("d", desk.now)
    desk.router(Finish(2))
    out = desk.register("d", "drafter", held=[Held(1, 4, 4), Held(2, 3, 0), Held(99, 8, 8)])
    assert to(out, "d") == [Commit(1, 1, 4, (11,)), Close(2)]
    desk.replica("d", Closed(2))
    desk.replica("d", Acked(1, 5, 4))
    assert to(desk.tick(9.0, alive=["d", "t"]), "d") == []
    assert to(desk.tick(1.0, alive=["d", "t"]), "d") == [Close(99)]


def test_a_replica_that_registers_anew_without_its_copy_has_lost_it(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 3, (10, 11)))
    desk.replica("d", Acked(1, 5, 5))
    assert to(desk.register("d", "drafter"), "d") == [Commit(1, 1, 4, (11,))]
    assert not desk.core.converged(1)


@pytest.mark.parametrize("replicas_first", [True, False])
def test_a_restarted_coordinator_is_rebuilt_from_routers_and_replicas(replicas_first: bool) -> None:
    desk = Desk()
    resume = Resume(1, 7, (1, 2, 3, 10, 11), 16, {"drafter": "d", "target": "t"})
    out: list[Outgoing] = []
    if not replicas_first:
        out += desk.router(resume)
    out += desk.register("d", "drafter", held=[Held(1, 3, 3)])
    out += desk.register("t", "target", held=[Held(1, 5, 4)])
    if replicas_first:
        out += desk.router(resume)
    assert to(out, "d") == [Commit(1, 7, 3, (10, 11))]
    assert to(out, "t") == []
    assert desk.core.ledger.replicas["t"].reserved == {1: 5}
    desk.replica("d", Acked(1, 5, 3))
    assert desk.core.converged(1)
    assert to(desk.tick(20.0, alive=["d", "t"]), "d") == []


def test_a_resumed_holder_that_never_comes_is_given_up() -> None:
    desk = Desk()
    desk.register("t", "target", held=[Held(1, 4, 3)])
    desk.router(Resume(1, 7, (1, 2, 3, 10), 16, {"drafter": "gone", "target": "t"}))
    assert not desk.core.converged(1)
    desk.tick(10.0, alive=["t"])
    assert desk.core.converged(1)


def test_a_lost_router_keeps_its_sequences_for_the_lease(desk: Desk) -> None:
    desk.admit(1)
    desk.router(Committed(1, 1, 0, (1, 2, 3, 10)))
    desk.core.router_lost("router", desk.now)
    desk.tick(5.0, alive=["d", "t"])
    desk.core.router_connected("router", desk.now)
    desk.router(Resume(1, 1, (1, 2, 3, 10), 16, {"drafter": "d", "target": "t"}))
    desk.tick(20.0, alive=["d", "t"])
    assert 1 in desk.core.ledger.running
    desk.core.router_lost("router", desk.now)
    out = desk.tick(10.0, alive=["d", "t"])
    assert Close(1) in to(out, "d")
    assert Close(1) in to(out, "t")


def test_the_next_router_ends_the_sequences_of_the_last(desk: Desk) -> None:
    desk.admit(1)
    desk.core.router_lost("router", desk.now)
    out = desk.core.router_connected("router-2", desk.now)
    assert Close(1) in to(out, "d")
    assert Close(1) in to(out, "t")
    (answer,) = admitted(desk.router(Resume(1, 1, (1, 2, 3), 16, {}), "router-2"))
    assert answer.refusal == "sequence 1 is closed"


def test_a_lost_router_waits_for_nothing() -> None:
    desk = Desk()
    desk.admit(1)
    desk.core.router_lost("router", desk.now)
    assert desk.core.num_waiting == 0
    assert admitted(desk.register("t")) == []
