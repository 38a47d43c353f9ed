"""What the table learned comes back after a restart, as a start and not as an anchor."""

import random

import pytest

from kvstate.protocol import Profile
from router.checks import CheckSeen
from router.learned import MOST_RESTORED, NOTHING, UnreadableError, decode, encode
from router.table import RouterTable

CODE = ("short code", "greedy")


def grown() -> RouterTable:
    table, rng = RouterTable(), random.Random(2)
    for level, name in enumerate(("a", "b", "c"), 1):
        table.add_model(name, level, Profile(1.0))
    for _ in range(900):
        table.observe_check(CheckSeen("a", "b", 4, 4 if rng.random() < 0.7 else 0, 4), CODE)
        table.observe_probe({"a": [1], "b": [int(rng.random() < 0.5)], "c": [1]})
        table.observe_draft("a", 4, rng.choice((2, 4)))
        table.observe_request(("a", "b"), 40, rng.choice((5, 35)), CODE)
    return table


def test_a_restarted_table_predicts_what_the_old_one_did() -> None:
    old = grown()
    new = RouterTable(decode(encode(old.learned())))
    for level, name in ((3, "c"), (1, "a"), (2, "b")):  # replicas register in any order
        new.add_model(name, level, Profile(1.0))
    before, after = old.snapshot(), new.snapshot()
    assert after.pairs.keys() == before.pairs.keys()
    for pair in before.pairs:
        assert after.acceptance(*pair) == pytest.approx(before.acceptance(*pair), abs=0.02)
    seen_before, seen_after = old.snapshot(CODE), new.snapshot(CODE)
    assert seen_after.draft_goes_on("a", "b", 4) == pytest.approx(seen_before.draft_goes_on("a", "b", 4), abs=0.1)
    assert seen_after.pairs["a", "b"].prior_positions == seen_before.pairs["a", "b"].prior_positions
    assert after.association == pytest.approx(before.association, abs=0.2)
    assert after.draft_continues("a", 4) == pytest.approx(before.draft_continues("a", 4), abs=0.05)


def test_what_was_restored_gives_way_to_what_is_seen() -> None:
    new = RouterTable(grown().learned())
    for level, name in enumerate(("a", "b", "c"), 1):
        new.add_model(name, level, Profile(1.0))
    assert new.snapshot().pairs["a", "b"].samples <= MOST_RESTORED
    for _ in range(300):
        new.observe_check(CheckSeen("a", "b", 1, 0, 1))
    assert new.snapshot().acceptance("a", "b") < 0.3


def test_models_that_are_gone_are_left_out_and_new_ones_start_as_ever() -> None:
    new = RouterTable(grown().learned())
    for level, name in enumerate(("b", "c", "d"), 1):
        new.add_model(name, level, Profile(1.0))
    snapshot = new.snapshot()
    assert set(snapshot.pairs) == {("b", "c"), ("b", "d"), ("c", "d")}
    assert snapshot.pairs["b", "d"].samples == 0
    assert not snapshot.association


@pytest.mark.parametrize("data", [b"", b"{}", b"[1", encode(NOTHING).replace(b'"version":1', b'"version":99')])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode(data)
