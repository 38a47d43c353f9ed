import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstate.protocol import Acked, Check, Commit, Draft, Key, Need, Open, Opened, Probe, Sampling, Step
from kvstate.sequence import (
    ConflictingCommit,
    MalformedStep,
    Ready,
    SequenceState,
    Stale,
    accept_step,
    apply_commit,
    apply_open,
    evict,
    reconcile,
)


def opened(tokens: Sequence[int], kv_len: int = 0) -> SequenceState:
    state = SequenceState(1)
    assert apply_open(state, Open(1, tuple(tokens), 1, Sampling())) == Opened(1, len(tokens), 0)
    state.kv_len = kv_len
    return state


def check(key: tuple[int, int], committed_len: int, from_len: int, tokens: Sequence[int], count: int = 0) -> Check:
    return Check(1, Key(*key), committed_len, from_len, tuple(tokens), count)


def draft(key: tuple[int, int], committed_len: int, from_len: int, tokens: Sequence[int], count: int = 4) -> Draft:
    return Draft(1, Key(*key), committed_len, from_len, tuple(tokens), count)


def probe(key: tuple[int, int], from_len: int, tokens: Sequence[int]) -> Probe:
    return Probe(1, Key(*key), from_len + len(tokens), from_len, tuple(tokens), 1)


def commit(from_len: int, tokens: Sequence[int]) -> Commit:
    return Commit(1, 0, from_len, tuple(tokens))


# ------------------------------------------------------------------------------------------------------- reconcile


@pytest.mark.parametrize(
    ("given_tokens", "expected", "rolled_back"),
    [
        ([3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 0),  # the same again
        ([3, 4, 9], [1, 2, 3, 4, 9], 1),  # differs at position 4: its row goes
        ([9, 4, 5, 6], [1, 2, 9, 4, 5, 6], 3),
        ([3], [1, 2, 3], 2),  # a shorter message cuts what was droppable
        ([], [1, 2], 3),
        ([3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], 0),
    ],
)
def test_reconcile_keeps_the_common_prefix(given_tokens: list[int], expected: list[int], rolled_back: int) -> None:
    state = SequenceState(1, tokens=[1, 2, 3, 4, 5, 6], committed_len=2, kv_len=5)
    assert reconcile(state, 2, given_tokens) == rolled_back
    assert state.tokens == expected
    assert state.kv_len == 5 - rolled_back
    assert reconcile(state, 2, given_tokens) == 0


def test_a_difference_in_the_committed_prefix_is_refused_and_changes_nothing() -> None:
    state = SequenceState(7, tokens=[1, 2, 3, 4], committed_len=3, kv_len=4)
    with pytest.raises(ConflictingCommit, match="sequence 7: position 2 is committed as 3, not 9") as caught:
        reconcile(state, 1, [2, 9])
    assert (state.tokens, state.committed_len, state.kv_len) == ([1, 2, 3, 4], 3, 4)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_committed_tokens_stay_when_a_message_ends_below_them() -> None:
    state = SequenceState(1, tokens=[1, 2, 3, 4], committed_len=3, kv_len=4)
    assert reconcile(state, 0, [1, 2]) == 1
    assert state.tokens == [1, 2, 3]


TOKENS = st.lists(st.integers(0, 2), max_size=10)


@given(
    known=TOKENS, committed_len=st.integers(0, 10), kv_len=st.integers(0, 10), from_len=st.integers(0, 10), new=TOKENS
)
def test_reconcile_against_recomputing(
    known: list[int], committed_len: int, kv_len: int, from_len: int, new: list[int]
) -> None:
    state = SequenceState(1, list(known), min(committed_len, len(known)), min(kv_len, len(known)))
    from_len = min(from_len, len(known))
    target, before = known[:from_len] + new, state.kv_len
    same = 0
    while same < min(len(known), len(target)) and known[same] == target[same]:
        same += 1
    if same < min(state.committed_len, len(target)):
        with pytest.raises(ConflictingCommit):
            reconcile(state, from_len, new)
        assert (state.tokens, state.kv_len) == (known, before)
        return
    rolled_back = reconcile(state, from_len, new)
    state.check_integrity()
    assert state.tokens == (target if len(target) >= state.committed_len else known[: state.committed_len])
    assert state.kv_len == min(before, max(same, state.committed_len))
    assert rolled_back == before - state.kv_len


# ----------------------------------------------------------------------------------------------------------- steps


def test_a_sequence_never_opened_needs_everything() -> None:
    state = SequenceState(1)
    assert accept_step(state, draft((0, 1), 3, 0, [1, 2, 3])) == Need(1, Key(0, 1), 0, unknown=True)
    assert state == SequenceState(1)


def test_a_gap_is_answered_with_need_and_the_resend_is_accepted() -> None:
    state = opened([1, 2, 3])
    assert accept_step(state, draft((1, 1), 3, 3, [8, 9])) == Ready(0)
    # It holds 5 tokens, but only 3 for certain: those past them may be another round's guesses.
    assert accept_step(state, draft((2, 1), 5, 5, [])) == Need(1, Key(2, 1), 3)
    assert state.last_key == Key(1, 1)
    assert accept_step(state, draft((2, 2), 5, 3, [8, 9])) == Ready(0)
    assert (state.tokens, state.committed_len) == ([1, 2, 3, 8, 9], 5)


def test_keys_at_or_below_the_last_are_stale() -> None:
    state = opened([1, 2])
    assert accept_step(state, check((1, 5), 2, 2, [7])) == Ready(0)
    for key in [(1, 5), (1, 4), (0, 9)]:
        assert accept_step(state, check(key, 2, 2, [8])) == Stale()
    assert state.tokens == [1, 2, 7]
    assert accept_step(state, check((2, 0), 2, 2, [8])) == Ready(0)
    assert state.tokens == [1, 2, 8]


def test_a_step_overtaken_by_a_commit_is_stale() -> None:
    state = opened([1, 2])
    apply_commit(state, commit(2, [3, 4]))
    assert accept_step(state, draft((1, 1), 2, 2, [9])) == Stale(Need(1, Key(1, 1), 4))  # a guess that lost
    assert accept_step(state, draft((1, 2), 2, 2, [3])) == Stale(Need(1, Key(1, 2), 4))  # would guess what is known
    assert state.tokens == [1, 2, 3, 4]
    assert accept_step(state, draft((1, 3), 2, 2, [3, 4, 5])) == Ready(0)
    assert (state.tokens, state.committed_len) == ([1, 2, 3, 4, 5], 4)
    with pytest.raises(ConflictingCommit):
        accept_step(state, draft((1, 4), 3, 2, [9, 4]))


def test_a_prefill_overtaken_by_the_first_commit_still_runs() -> None:
    state = opened([1, 2, 3])
    apply_commit(state, commit(3, [4]))
    assert accept_step(state, draft((0, 1), 3, 0, [1, 2, 3], count=0)) == Ready(0)
    assert (state.tokens, state.committed_len) == ([1, 2, 3, 4], 4)


def test_a_probe_changes_no_token_that_matches() -> None:
    state = opened([1, 2])
    assert accept_step(state, draft((1, 1), 2, 2, [3, 4, 5])) == Ready(0)
    state.kv_len = 5
    assert accept_step(state, probe((1, 2), 2, [3])) == Ready(0)
    assert (state.tokens, state.committed_len, state.kv_len) == ([1, 2, 3, 4, 5], 3, 5)
    assert accept_step(state, probe((1, 3), 3, [9])) == Ready(2)
    assert (state.tokens, state.committed_len, state.kv_len) == ([1, 2, 3, 9], 4, 3)


@pytest.mark.parametrize("step", [check((1, 1), 5, 2, [3, 4]), Probe(1, Key(1, 1), 3, 2, (3, 4), 1)])
def test_a_step_that_contradicts_its_committed_len_is_refused(step: Step) -> None:
    state = opened([1, 2])
    with pytest.raises(MalformedStep, match="end at 4"):
        accept_step(state, step)
    assert state.last_key is None


# --------------------------------------------------------------------------------------------------------- commits


def test_a_commit_makes_matching_guesses_permanent_with_their_kv() -> None:
    state = opened([1, 2])
    accept_step(state, draft((1, 1), 2, 2, [3, 4, 5]))
    state.kv_len = 5
    assert apply_commit(state, commit(2, [3, 4])) == Acked(1, 4, 5)
    assert state.tokens == [1, 2, 3, 4, 5]
    assert apply_commit(state, commit(4, [9])) == Acked(1, 5, 4)
    assert state.tokens == [1, 2, 3, 4, 9]


def test_old_commits_and_gaps_acknowledge_the_lengths_there_are() -> None:
    state = opened([1, 2, 3, 4], kv_len=3)
    assert apply_commit(state, commit(2, [3])) == Acked(1, 4, 3)
    assert apply_commit(state, commit(5, [6])) == Acked(1, 4, 3)
    assert state.tokens == [1, 2, 3, 4]
    with pytest.raises(ConflictingCommit):
        apply_commit(state, commit(2, [9]))


def test_a_commit_to_a_sequence_never_opened_is_unknown() -> None:
    state = SequenceState(1)
    assert apply_commit(state, commit(0, [1, 2])) == Acked(1, 0, 0, unknown=True)
    assert state.tokens == []


def test_opening_again_changes_nothing() -> None:
    state = opened([1, 2])
    accept_step(state, draft((1, 1), 2, 2, [3, 4]))
    state.kv_len = 4
    assert apply_open(state, Open(1, (1, 2), 1, Sampling())) == Opened(1, 2, 4)
    assert state.tokens == [1, 2, 3, 4]


def test_eviction_keeps_the_tokens() -> None:
    state = opened([1, 2, 3], kv_len=3)
    assert evict(state) == 3
    assert accept_step(state, draft((1, 1), 3, 3, [])) == Ready(0)
    assert (state.tokens, state.kv_len) == ([1, 2, 3], 0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_loss_and_order_of_messages_ends_at_the_truth(data: st.DataObject) -> None:
    """Steps and commits of a text, lost, repeated and in any order: committed tokens are a prefix of it, always."""
    text = data.draw(st.lists(st.integers(0, 2), min_size=2, max_size=16), label="text")
    messages: list[Step | Commit] = []
    for i in range(data.draw(st.integers(0, 12), label="messages")):
        committed_len = data.draw(st.integers(2, len(text)))  # a probe needs a token before it
        from_len = data.draw(st.integers(0, committed_len))
        base = text[from_len:committed_len]
        guesses = data.draw(st.lists(st.integers(0, 2), max_size=4))
        step = draft((i, 0), committed_len, from_len, base + guesses)
        choices: list[Step | Commit] = [step, probe((i, 1), from_len, base), commit(from_len, base)]
        messages.append(data.draw(st.sampled_from(choices)))
    order = data.draw(st.permutations(messages + messages), label="order")
    state = opened(text[:1], kv_len=1)
    for message in order[: data.draw(st.integers(0, len(order)))]:
        before = (list(state.tokens), state.committed_len)
        answer = apply_commit(state, message) if isinstance(message, Commit) else accept_step(state, message)
        state.check_integrity()
        assert state.tokens[: state.committed_len] == text[: state.committed_len]
        assert state.committed_len >= before[1]
        if isinstance(answer, Need | Stale):
            assert (state.tokens, state.committed_len) == before
        elif isinstance(message, Draft):
            assert state.tokens[message.from_len :] == list(message.tokens)
        state.kv_len = data.draw(st.integers(state.kv_len, len(state.tokens)))
    assert apply_commit(state, commit(0, text)).committed_len == len(text)
    assert state.tokens[: len(text)] == text


# ------------------------------------------------------------------------------------------- rounds, at state level


def run_rows(state: SequenceState) -> int:
    """Compute what is missing, as an engine does: all tokens but the last when it only drafts. Returns the rows."""
    rows = len(state.tokens) - state.kv_len
    state.kv_len = len(state.tokens)
    return rows


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_lengths_after_a_round(accepted: int) -> None:
    """k drafted, a accepted: the target keeps base + a; a drafter that saw all k lacks one entry only if all held."""
    k, base = 4, [1, 2, 3]
    drafter, target = opened(base, kv_len=3), opened(base, kv_len=3)
    guesses = [10, 11, 12, 13]
    assert accept_step(drafter, draft((1, 1), 3, 3, [], count=k)) == Ready(0)
    drafter.tokens += guesses  # its own samples; the last has no row yet
    drafter.kv_len = 3 + k - 1
    assert accept_step(target, check((1, 2), 3, 3, guesses, count=k)) == Ready(0)
    assert run_rows(target) == k
    verdict = (*guesses[:accepted], 99)
    for state in (drafter, target):
        assert apply_commit(state, commit(3, verdict)).committed_len == 3 + accepted + 1
        assert state.tokens == base + list(verdict)
    assert target.kv_len == 3 + accepted
    missing = len(drafter.tokens) - 1 - drafter.kv_len
    assert missing == (1 if accepted == k else 0)


def test_a_model_that_was_off_the_chain_catches_up_from_its_commits() -> None:
    """40 rounds of commits without a step: all tokens are known, all rows still to compute, nothing rolled back."""
    state, text = opened([1, 2, 3], kv_len=3), [1, 2, 3]
    for epoch in range(40):
        verdict = (epoch, 100 + epoch)
        assert apply_commit(state, Commit(1, epoch, len(text), verdict)) == Acked(1, len(text) + 2, 3)
        text += verdict
    assert accept_step(state, draft((40, 1), len(text), len(text), [])) == Ready(0)
    assert state.tokens == text
    assert run_rows(state) == 80


def test_rows_of_unequal_acceptance_do_not_share_a_length() -> None:
    states = [SequenceState(i, [0] * n, n, n, sampling=Sampling()) for i, n in enumerate((3, 7, 5))]
    lengths = []
    for state, accepted in zip(states, (0, 4, 2), strict=True):
        n = state.committed_len
        accept_step(state, Check(state.seq, Key(1, 1), n, n, (1, 2, 3, 4), 4))
        run_rows(state)
        acked = apply_commit(state, Commit(state.seq, 1, n, (*range(1, accepted + 1), 9)))
        lengths.append((acked.committed_len, acked.kv_len))
    assert lengths == [(4, 3), (12, 11), (8, 7)]
