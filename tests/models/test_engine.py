"""The engine over emulated models, message by message: what it answers, what it keeps, and what it drops."""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from msgspec.structs import replace

from kvstate.protocol import (
    Acked,
    Check,
    Close,
    Closed,
    Commit,
    Draft,
    Drafted,
    Finish,
    Key,
    Message,
    Need,
    Open,
    Opened,
    Probe,
    Probed,
    Sampling,
    Verdict,
)
from models.emulated import EmulatedBackend, EmulateSpec, reference
from models.engine import Engine, UnknownMessage
from models.hashing import ROOT, mix

PROMPT = tuple(b"The engine takes whatever is ready.")
MOST_STEPS = 500
M = TypeVar("M", bound=Message)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Replica:
    """An engine with its clock and the replies that it delivered."""

    def __init__(
        self,
        agreement: float = 1.0,
        name: str = "target",
        rank: int = 1,
        *,
        num_blocks: int = 256,
        max_rows: int = 256,
        lease_s: float = 30.0,
        prompt_tokens: int | None = None,
    ) -> None:
        spec = EmulateSpec(base_ms=0.0, agreement=agreement)
        backend = EmulatedBackend(name, rank, spec, num_blocks, block_tokens=4, sleep=lambda _: None)
        self.clock = Clock()
        self.delivered: list[tuple[object, Message]] = []
        self.engine = Engine(
            backend,
            self.delivered.extend,
            max_rows=max_rows,
            lease_s=lease_s,
            prompt_tokens=prompt_tokens,
            clock=self.clock,
        )

    def send(self, *messages: Message) -> list[Message]:
        """The replies to `messages`, once nothing is left to compute."""
        seen = len(self.delivered)
        self.engine.submit("router", messages)
        for _ in range(MOST_STEPS):
            if not self.engine.step():
                return [message for _, message in self.delivered[seen:]]
        raise AssertionError("the engine never comes to rest")

    def ask(self, kind: type[M], message: Message) -> M:
        """The only reply to `message`, which must be of this kind."""
        (reply,) = self.send(message)
        assert isinstance(reply, kind)
        return reply

    def lengths(self, seq: int) -> tuple[int, int]:
        """(committed_len, kv_len)."""
        return next((h.committed_len, h.kv_len) for h in self.engine.held() if h.seq == seq)


def opening(seq: int = 1, tokens: Sequence[int] = PROMPT) -> Open:
    return Open(seq, tuple(tokens), len(tokens), Sampling())


def check(seq: int, epoch: int, committed: Sequence[int], from_len: int, drafts: Sequence[int] = ()) -> Check:
    tokens = tuple(committed[from_len:]) + tuple(drafts)
    return Check(seq, Key(epoch, 1), len(committed), from_len, tokens, len(drafts))


def draft(seq: int, epoch: int, committed: Sequence[int], from_len: int, count: int) -> Draft:
    return Draft(seq, Key(epoch, 0), len(committed), from_len, tuple(committed[from_len:]), count)


def target_text(prompt: Sequence[int], count: int) -> list[int]:
    """What an errorless model writes after `prompt`, from the definition of the emulated model alone."""
    state, text = ROOT, list(prompt)
    for token in text:
        state = mix(state, token)
    for _ in range(count):
        text.append(reference(state))
        state = mix(state, text[-1])
    return text[len(prompt) :]


class Pair:
    """A drafter and a target that write one sequence in rounds, as the router drives them."""

    def __init__(self, drafter: Replica, target: Replica, prompt: Sequence[int] = PROMPT) -> None:
        self.drafter, self.target = drafter, target
        self.committed = list(prompt)
        self.epoch = 0
        self.draft_known, self.target_known = len(prompt), len(prompt)
        for replica in (drafter, target):
            replica.ask(Opened, opening(1, prompt))

    def draft(self, replica: Replica, known: int, count: int) -> tuple[int, ...]:
        return replica.ask(Drafted, draft(1, self.epoch, self.committed, known, count)).tokens

    def round(self, count: int) -> int:
        """How many of `count` drafted tokens the target accepts; 0 leaves the drafter out."""
        self.epoch += 1
        drafts: tuple[int, ...] = ()
        if count:
            drafts = self.draft(self.drafter, self.draft_known, count)
            self.draft_known = len(self.committed)
        verdict = self.target.ask(Verdict, check(1, self.epoch, self.committed, self.target_known, drafts))
        self.target_known = len(self.committed)
        self.committed += [*drafts[: verdict.num_accepted], verdict.own_token]
        return verdict.num_accepted


# ------------------------------------------------------------------------------------------------------ each message


def test_open_computes_nothing_and_is_idempotent() -> None:
    replica = Replica()
    assert replica.ask(Opened, opening()) == Opened(1, len(PROMPT), 0)
    assert replica.ask(Opened, opening()) == Opened(1, len(PROMPT), 0)
    assert replica.engine.stats.forwards == 0


def test_replies_go_to_the_one_who_sent() -> None:
    replica = Replica()
    replica.engine.submit("router", [opening()])
    replica.engine.submit("coordinator", [Commit(1, 1, len(PROMPT), (97,))])
    replica.engine.step()
    assert [(sender, type(reply)) for sender, reply in replica.delivered] == [
        ("router", Opened),
        ("coordinator", Acked),
    ]


def test_plain_decoding_writes_the_target_text() -> None:
    pair = Pair(Replica(0.5, "drafter", 0), Replica())
    for _ in range(20):
        assert pair.round(0) == 0
    assert pair.committed[len(PROMPT) :] == target_text(PROMPT, 20)
    assert pair.target.lengths(1) == (len(pair.committed) - 1, len(pair.committed) - 1)


def test_draft_continues_by_its_own_samples() -> None:
    replica = Replica()
    replica.ask(Opened, opening())
    reply = replica.ask(Drafted, draft(1, 1, PROMPT, len(PROMPT), 5))
    assert list(reply.tokens) == target_text(PROMPT, 5)
    assert (reply.committed_len, reply.kv_len) == (len(PROMPT), len(PROMPT) + 4)
    assert reply.timing.rows == len(PROMPT) + 4
    assert reply.timing.batches == 5


def test_draft_of_no_tokens_only_computes_kv() -> None:
    replica = Replica()
    replica.ask(Opened, opening())
    reply = replica.ask(Drafted, draft(1, 1, PROMPT, len(PROMPT), 0))
    assert (reply.tokens, reply.committed_len, reply.kv_len) == ((), len(PROMPT), len(PROMPT))
    rows = replica.engine.stats.rows
    assert list(replica.ask(Drafted, draft(1, 2, PROMPT, len(PROMPT), 1)).tokens) == target_text(PROMPT, 1)
    assert replica.engine.stats.rows - rows == 1


@pytest.mark.parametrize("num_right", range(5))
def test_check_accepts_the_equal_prefix_and_drops_the_rest(num_right: int) -> None:
    replica = Replica()
    replica.ask(Opened, opening())
    right = target_text(PROMPT, 5)
    drafts = [*right[:num_right], *(token ^ 1 for token in right[num_right:4])]
    reply = replica.ask(Verdict, check(1, 1, PROMPT, len(PROMPT), drafts))
    assert (reply.num_accepted, reply.own_token) == (num_right, right[num_right])
    assert reply.kv_len == len(PROMPT) + num_right
    assert replica.engine.stats.rolled_back_tokens == 4 - num_right


def test_probe_samples_committed_positions_and_changes_no_token() -> None:
    replica = Replica()
    text = [*PROMPT, *target_text(PROMPT, 6)]
    replica.ask(Opened, opening())
    probe = Probe(1, Key(1, 0), len(text), len(PROMPT), tuple(text[len(PROMPT) :]), 4)
    reply = replica.ask(Probed, probe)
    assert (reply.from_len, list(reply.samples)) == (len(text) - 4, text[-4:])
    assert replica.lengths(1) == (len(text), len(text) - 1)
    verdict = replica.ask(Verdict, check(1, 2, text, len(text)))
    assert [verdict.own_token] == target_text(text, 1)


def test_checks_and_probes_state_the_likeliest_tokens_where_asked() -> None:
    """An emulated model's distribution is a point mass. Rows that a small forward splits are told in order."""
    replica = Replica(max_rows=3)
    replica.ask(Opened, opening())
    right = target_text(PROMPT, 5)
    asked = replace(check(1, 1, PROMPT, len(PROMPT), [*right[:2], right[2] ^ 1, right[3]]), num_top=16)
    verdict = replica.ask(Verdict, asked)
    assert verdict.num_accepted == 2
    assert verdict.tops == tuple(((token, 1.0),) for token in right[:3])
    text = [*PROMPT, *right]
    probe = Probe(1, Key(2, 0), len(text), len(PROMPT), tuple(right), 5, num_top=1)
    assert replica.ask(Probed, probe).tops == tuple(((token, 1.0),) for token in right)
    assert replica.ask(Probed, replace(probe, key=Key(2, 1), num_top=0)).tops == ()
    assert replica.ask(Verdict, check(1, 3, text, len(text))).tops == ()


def test_commit_keeps_matching_drafts_and_replaces_others() -> None:
    replica = Replica()
    replica.ask(Opened, opening())
    drafts = replica.ask(Drafted, draft(1, 1, PROMPT, len(PROMPT), 4)).tokens
    base = len(PROMPT)
    assert replica.ask(Acked, Commit(1, 1, base, drafts[:2])) == Acked(1, base + 2, base + 3)
    assert replica.ask(Acked, Commit(1, 1, base + 2, (drafts[2] ^ 1, 33))) == Acked(1, base + 4, base + 2)
    text = [*PROMPT, *drafts[:2], drafts[2] ^ 1, 33]
    assert [replica.ask(Verdict, check(1, 2, text, len(text))).own_token] == target_text(text, 1)


def test_close_frees_all_and_is_acknowledged_when_unknown() -> None:
    replica = Replica()
    free_blocks = replica.engine.report().free_blocks
    replica.send(opening(), draft(1, 1, PROMPT, len(PROMPT), 4))
    assert replica.engine.report().free_blocks < free_blocks
    assert replica.ask(Closed, Close(1)) == Closed(1)
    assert replica.ask(Closed, Close(1)) == Closed(1)
    report = replica.engine.report()
    assert (report.free_blocks, report.sequences) == (free_blocks, 0)


def test_close_ends_a_step_under_way() -> None:
    replica = Replica(max_rows=4)
    replica.engine.submit("router", [opening(), check(1, 1, PROMPT, len(PROMPT))])
    replica.engine.step()
    assert replica.send(Close(1)) == [Closed(1)]


# ------------------------------------------------------------------------------------------- what cannot be served


def test_unknown_sequence_is_needed_from_its_start() -> None:
    replica = Replica()
    key = Key(3, 1)
    assert replica.ask(Need, check(9, 3, PROMPT, len(PROMPT))) == Need(9, key, 0, unknown=True)
    assert replica.ask(Acked, Commit(9, 3, 0, (97,))) == Acked(9, 0, 0, unknown=True)
    assert replica.engine.report().counts.resent_prefixes == 1
    assert replica.engine.stats.forwards == 0


def test_gap_is_needed_and_the_resend_is_served() -> None:
    replica = Replica()
    replica.ask(Opened, opening())
    text = [*PROMPT, *target_text(PROMPT, 6)]
    assert replica.ask(Need, draft(1, 4, text, len(text) - 2, 2)) == Need(1, Key(4, 0), len(PROMPT))
    assert replica.ask(Acked, Commit(1, 4, len(text) - 2, tuple(text[-2:]))) == Acked(1, len(PROMPT), 0)
    assert replica.engine.stats.forwards == 0
    reply = replica.ask(Drafted, draft(1, 5, text, len(PROMPT), 2))
    assert list(reply.tokens) == target_text(text, 2)
    assert replica.engine.report().counts.resent_prefixes == 1


def test_stale_key_is_counted_and_not_answered() -> None:
    replica = Replica()
    replica.ask(Opened, opening())
    replica.ask(Verdict, check(1, 2, PROMPT, len(PROMPT)))
    assert replica.send(check(1, 2, PROMPT, len(PROMPT))) == []
    assert replica.send(draft(1, 1, PROMPT, len(PROMPT), 3)) == []
    assert replica.engine.report().counts.stale_messages == 2


def test_later_step_replaces_the_one_under_way() -> None:
    replica = Replica(max_rows=8)
    replica.engine.submit("router", [opening(), draft(1, 1, PROMPT, len(PROMPT), 3)])
    replica.engine.step()
    (reply,) = replica.send(check(1, 2, PROMPT, len(PROMPT)))[-1:]
    assert isinstance(reply, Verdict)
    assert [reply.own_token] == target_text(PROMPT, 1)
    assert [type(message) for _, message in replica.delivered] == [Opened, Verdict]


# -------------------------------------------------------------------------------------------- batches, rows and room


def test_prefill_in_chunks_gives_the_same_verdict() -> None:
    drafts = [*target_text(PROMPT, 2), 33]
    whole, chunked = Replica(0.6), Replica(0.6, max_rows=8)
    verdicts = []
    for replica in (whole, chunked):
        replica.ask(Opened, opening())
        verdicts.append(replica.ask(Verdict, check(1, 1, PROMPT, len(PROMPT), drafts)))
    first, second = verdicts
    assert (first.num_accepted, first.own_token, first.kv_len) == (second.num_accepted, second.own_token, second.kv_len)
    assert whole.engine.stats.forwards == 1
    assert chunked.engine.stats.forwards == -(-(len(PROMPT) + 3) // 8)
    assert chunked.engine.stats.rows == whole.engine.stats.rows


def test_short_steps_pass_a_long_prefill() -> None:
    replica = Replica(max_rows=8)
    replica.send(opening(1), check(1, 1, PROMPT, len(PROMPT)))
    text = [*PROMPT, *target_text(PROMPT, 1)]
    other = PROMPT[::-1]  # not in the prefix cache
    opened = [opening(2, other), check(2, 1, other, len(other))]
    replica.engine.submit("router", [*opened, check(1, 2, text, len(PROMPT))])
    replica.engine.step()
    assert [(type(reply), getattr(reply, "seq", None)) for _, reply in replica.delivered[-2:]] == [
        (Opened, 2),
        (Verdict, 1),
    ]
    assert replica.lengths(2)[1] == 7


def test_several_sequences_share_a_forward_and_keep_apart() -> None:
    replica = Replica()
    prompts = {1: PROMPT, 2: PROMPT[:7], 3: tuple(b"another text"), 4: PROMPT[:-1]}
    right = {seq: target_text(prompt, 5) for seq, prompt in prompts.items()}
    replica.send(*(opening(seq, prompt) for seq, prompt in prompts.items()))
    steps = [  # sequence s has s − 1 right drafts among 4
        check(s, 1, p, len(p), [*right[s][: s - 1], *(t ^ 1 for t in right[s][s - 1 : 4])]) for s, p in prompts.items()
    ]
    verdicts = {v.seq: (v.num_accepted, v.own_token) for v in replica.send(*steps) if isinstance(v, Verdict)}
    assert verdicts == {seq: (seq - 1, right[seq][seq - 1]) for seq in prompts}
    assert replica.engine.stats.most_sequences_in_forward == 4
    assert replica.engine.stats.forwards == 1


def write_in_turns(replica: Replica, num_tokens: int) -> dict[int, list[int]]:
    """Three sequences, each by plain decoding, one token of each in turn; they need 3 × 6 … 8 blocks in all."""
    texts = {seq: list(PROMPT[: 20 + seq]) for seq in (1, 2, 3)}
    for seq, text in texts.items():
        replica.ask(Opened, opening(seq, text))
    for epoch in range(1, num_tokens + 1):
        for seq, text in texts.items():
            replica.clock.now_s += 0.01
            known = len(text) if epoch == 1 else len(text) - 1
            text.append(replica.ask(Verdict, check(seq, epoch, text, known)).own_token)
    return texts


def test_evicted_sequences_are_computed_again_with_the_same_samples() -> None:
    roomy, tight = Replica(0.6), Replica(0.6, num_blocks=9)
    assert write_in_turns(tight, 8) == write_in_turns(roomy, 8)
    assert roomy.engine.report().dropped == ()
    report = tight.engine.report()
    assert set(report.dropped) == {1, 2, 3}
    assert tight.engine.stats.rows > roomy.engine.stats.rows
    assert tight.engine.report().dropped == ()  # each is named once
    assert sum(kv_len > 0 for _, kv_len in map(tight.lengths, (1, 2, 3))) == 1


def test_longest_unheard_sequence_is_evicted() -> None:
    replica = Replica(num_blocks=12)
    prompts = {seq: PROMPT[seq : seq + 20] for seq in (1, 2, 3)}
    for seq in (1, 2):
        replica.clock.now_s += 1.0
        replica.send(opening(seq, prompts[seq]), check(seq, 1, prompts[seq], 20))
    replica.clock.now_s += 1.0
    replica.send(opening(1, prompts[1]))  # heard of again: now 2 is the older one
    replica.send(opening(3, prompts[3]), check(3, 1, prompts[3], 20))
    assert replica.engine.report().dropped == (2,)
    assert [replica.lengths(seq) for seq in (1, 2, 3)] == [(20, 20), (20, 0), (20, 20)]


def test_sequences_that_do_not_fit_together_are_served_in_turn() -> None:
    replica = Replica(num_blocks=10)
    prompts = {seq: PROMPT[: 30 + seq] for seq in (1, 2)}
    replies = replica.send(
        *(opening(seq, prompt) for seq, prompt in prompts.items()),
        *(check(seq, 1, prompt, len(prompt)) for seq, prompt in prompts.items()),
    )
    verdicts = {reply.seq: [reply.own_token] for reply in replies if isinstance(reply, Verdict)}
    assert verdicts == {seq: target_text(prompt, 1) for seq, prompt in prompts.items()}
    assert replica.engine.stats.most_sequences_in_forward == 1


def test_sequence_larger_than_the_replica_is_dropped_and_others_go_on() -> None:
    replica = Replica(num_blocks=4)
    small = PROMPT[:8]
    replica.send(opening(1), opening(2, small))
    replies = replica.send(check(1, 1, PROMPT, len(PROMPT)), check(2, 1, small, len(small)))
    assert [r.unknown for r in replies if isinstance(r, Need)] == [True]
    assert [[r.own_token] for r in replies if isinstance(r, Verdict)] == [target_text(small, 1)]
    assert [held.seq for held in replica.engine.held()] == [2]
    assert replica.engine.report().dropped == (1,)


def test_lease_does_not_end_while_a_step_is_served() -> None:
    replica = Replica(lease_s=30.0, max_rows=8)
    replica.ask(Opened, opening())
    replica.engine.submit("router", [check(1, 1, PROMPT, len(PROMPT))])
    num_steps = 0
    while not isinstance(replica.delivered[-1][1], Verdict):
        assert replica.engine.step(), "the sequence was dropped"
        replica.clock.now_s += 20.0
        num_steps += 1
    assert num_steps > 2
    replica.engine.step()
    assert [held.seq for held in replica.engine.held()] == [1]


def test_lease_ends_without_messages_only() -> None:
    replica = Replica(lease_s=30.0)
    free_blocks = replica.engine.report().free_blocks
    replica.send(opening(1), opening(2), draft(1, 1, PROMPT, len(PROMPT), 2), draft(2, 1, PROMPT, len(PROMPT), 2))
    replica.clock.now_s = 20.0
    replica.send(Commit(2, 1, len(PROMPT), (97,)))
    replica.clock.now_s = 31.0
    replica.send()
    assert [held.seq for held in replica.engine.held()] == [2]
    assert replica.engine.stats.expired_sequences == 1
    assert replica.ask(Need, draft(1, 2, PROMPT, len(PROMPT), 2)).unknown
    replica.clock.now_s = 51.0
    replica.send()
    assert replica.engine.held() == ()
    assert replica.engine.report().free_blocks == free_blocks


# --------------------------------------------------------------------------------------------------------- in rounds


def test_self_draft_accepts_everything_and_lacks_exactly_one_entry() -> None:
    pair = Pair(Replica(0.7), Replica(0.7))
    while len(pair.committed) < len(PROMPT) + 300:
        assert pair.round(4) == 4
        kv_len = len(pair.committed) - 1  # all but the target's own token
        assert pair.target.lengths(1)[1] == kv_len
        assert pair.drafter.lengths(1)[1] == kv_len - 1
    assert pair.target.engine.stats.rolled_back_tokens == 0
    assert pair.drafter.engine.stats.rolled_back_tokens == 0


def test_rounds_write_the_target_text_whatever_the_drafter_says() -> None:
    pair = Pair(Replica(0.6, "drafter", 0), Replica())
    accepted = [pair.round(4) for _ in range(40)]
    assert set(accepted) >= {0, 4}
    assert pair.committed[len(PROMPT) :] == target_text(PROMPT, sum(accepted) + 40)


def leave_out(pair: Pair, rounds: int, commits_reach_drafter: bool) -> None:
    """Rounds of the target alone; the coordinator tells the drafter of them, or it has to catch up later."""
    for _ in range(rounds):
        pair.round(0)
        if commits_reach_drafter:
            known = pair.drafter.lengths(1)[0]
            pair.drafter.ask(Acked, Commit(1, pair.epoch, known, tuple(pair.committed[known:])))
            pair.draft_known = len(pair.committed)


@pytest.mark.parametrize("commits_reach_drafter", [True, False])
def test_returning_after_40_rounds_off_the_chain_drafts_as_before(commits_reach_drafter: bool) -> None:
    before = after = 0
    for text in (b"one", b"two", b"three", b"four", b"five", b"six"):
        pair = Pair(Replica(0.7, "drafter", 0), Replica(), tuple(text))
        before += sum(pair.round(4) for _ in range(20))
        leave_out(pair, 40, commits_reach_drafter)
        fresh = Replica(0.7, "drafter", 0)
        fresh.ask(Opened, opening(1, pair.committed))
        pair.epoch += 1
        expected = pair.draft(fresh, len(pair.committed), 4)
        assert pair.draft(pair.drafter, pair.draft_known, 4) == expected
        pair.draft_known = len(pair.committed)
        after += sum(pair.round(4) for _ in range(20))
        assert pair.drafter.engine.stats.resent_prefixes == 0
    assert after > 0.75 * before, (before, after)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_commit_that_overtakes_a_check_keeps_its_tokens(steps_before: int) -> None:
    replica = Replica(0.5, max_rows=4)
    replica.engine.submit("router", [opening(), check(1, 1, PROMPT, len(PROMPT), b"abc")])
    for _ in range(steps_before):
        replica.engine.step()
    committed = tuple(b"zyxwvuts")
    replies = replica.send(Commit(1, 1, len(PROMPT), committed))
    text = [*PROMPT, *committed]
    assert not any(isinstance(reply, Verdict) for reply in replies)
    assert replica.lengths(1)[0] == len(text)
    own_token = replica.ask(Verdict, check(1, 2, text, len(text))).own_token
    alone = Replica(0.5)
    alone.ask(Opened, opening())
    assert own_token == alone.ask(Verdict, check(1, 1, text, len(PROMPT))).own_token


def test_commit_that_overtakes_a_draft_keeps_its_tokens() -> None:
    replica = Replica(max_rows=4)
    replica.engine.submit("router", [opening(), draft(1, 1, PROMPT, len(PROMPT), 6)])
    for _ in range(11):  # the prefill takes 9
        replica.engine.step()
    text = [*PROMPT, *b"zy"]
    acked, need = replica.send(Commit(1, 1, len(PROMPT), tuple(b"zy")))
    assert acked == Acked(1, len(text), len(PROMPT))
    assert need == Need(1, Key(1, 0), len(text))
    assert list(replica.ask(Drafted, draft(1, 2, text, len(text), 3)).tokens) == target_text(text, 3)


@pytest.mark.parametrize("committed", [b"zy", b"z", b""])
def test_probe_that_overtakes_a_draft_ends_it_where_its_tokens_lost(committed: bytes) -> None:
    """A drafter is ahead of a round that ended otherwise; the probe brings what was committed."""
    replica = Replica(max_rows=4)
    replica.engine.submit("router", [opening(), draft(1, 1, PROMPT, len(PROMPT), 6)])
    for _ in range(11):
        replica.engine.step()
    text = [*PROMPT, *committed]
    replies = replica.send(Probe(1, Key(1, 2), len(text), len(PROMPT), tuple(committed), 2))
    (probed,) = [reply for reply in replies if isinstance(reply, Probed)]
    assert probed.key == Key(1, 2)
    others = [reply for reply in replies if reply is not probed]
    if committed:
        assert others == [Need(1, Key(1, 0), len(text))]
    else:
        assert [(type(reply), len(reply.tokens)) for reply in others if isinstance(reply, Drafted)] == [(Drafted, 6)]
    assert list(replica.ask(Drafted, draft(1, 3, text, len(text), 3)).tokens) == target_text(text, 3)


def test_a_message_that_no_honest_peer_sends_costs_one_sequence() -> None:
    """A count beyond the tokens, another token at a permanent position: dropped; the others are served on."""
    replica = Replica()
    replica.send(opening(1), opening(2), opening(3))
    wrong = Commit(2, 1, 0, tuple(reversed(PROMPT)))
    replies = replica.send(check(1, 1, PROMPT, len(PROMPT)), Check(3, Key(1, 1), len(PROMPT), 0, PROMPT, 99), wrong)
    assert [reply.seq for reply in replies if isinstance(reply, Verdict)] == [1]
    assert [held.seq for held in replica.engine.held()] == [1]
    assert set(replica.engine.report().dropped) == {2, 3}


def test_a_message_of_another_kind_is_the_senders_fault() -> None:
    replica = Replica()
    with pytest.raises(UnknownMessage, match="Finish"):
        replica.engine.submit("peer", [Finish(1)])


def test_a_drafter_reads_only_the_end_of_a_long_prompt() -> None:
    replica = Replica(name="drafter", rank=0, prompt_tokens=8)
    blocks = replica.engine.report().free_blocks
    replica.send(opening(), draft(1, 1, PROMPT, len(PROMPT), 0))
    assert (replica.engine.stats.rows, replica.lengths(1)) == (8, (len(PROMPT), len(PROMPT)))
    assert blocks - replica.engine.report().free_blocks == 2
    drafted = replica.ask(Drafted, draft(1, 2, PROMPT, len(PROMPT), 3))
    assert list(drafted.tokens) == target_text(PROMPT, 3)
    assert replica.engine.stats.rows == 8 + 3  # the last row is computed again, for its sample


def test_what_is_evicted_of_it_is_computed_again_from_there() -> None:
    replica = Replica(name="drafter", rank=0, prompt_tokens=8)
    replica.send(opening(), draft(1, 1, PROMPT, len(PROMPT), 0))
    blocks = replica.engine.report().free_blocks
    replica.engine.evict(1)
    assert replica.engine.report().free_blocks == blocks + 2
    assert list(replica.ask(Drafted, draft(1, 2, PROMPT, len(PROMPT), 3)).tokens) == target_text(PROMPT, 3)
    assert replica.engine.stats.rows == 8 + 8 + 2


def test_a_short_prompt_is_read_whole_and_shared() -> None:
    replica = Replica(name="drafter", rank=0, prompt_tokens=len(PROMPT))
    for seq in (1, 2):
        replica.send(opening(seq), draft(seq, 1, PROMPT, len(PROMPT), 0))
    assert replica.engine.stats.cached_tokens == (len(PROMPT) - 1) // 4 * 4


def test_a_part_that_is_not_read_is_not_shared() -> None:
    replica = Replica(name="drafter", rank=0, prompt_tokens=8)
    for seq in (1, 2):
        replica.send(opening(seq), draft(seq, 1, PROMPT, len(PROMPT), 0))
    assert (replica.engine.stats.cached_tokens, replica.engine.stats.rows) == (0, 16)


def test_samples_within_the_part_that_is_not_read_are_refused() -> None:
    replica = Replica(name="drafter", rank=0, prompt_tokens=8)
    replica.send(opening())
    assert replica.send(check(1, 1, PROMPT[:-12], 0, PROMPT[-12:])) == []
    assert replica.engine.report().dropped == (1,)


def test_a_step_that_comes_while_a_forward_runs_waits_in_the_queue() -> None:
    """Not on the way there and back."""
    replica = Replica()
    replica.send(opening(1), opening(2))
    backend = replica.engine._backend
    assert isinstance(backend, EmulatedBackend)
    late = [check(2, 1, PROMPT, len(PROMPT))]

    def compute(_: float) -> None:
        replica.clock.now_s += 1.0
        if late:
            replica.engine.submit("router", [late.pop()])
            replica.clock.now_s += 2.0

    backend._sleep = compute
    first, second = (m for m in replica.send(check(1, 1, PROMPT, len(PROMPT))) if isinstance(m, Verdict))
    assert (first.timing.busy_s, first.timing.queue_s) == (3.0, 0.0)
    assert (second.timing.busy_s, second.timing.queue_s) == (1.0, 2.0)
