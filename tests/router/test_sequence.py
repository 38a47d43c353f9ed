"""What is kept of the target's likeliest tokens: of the last committed positions, from rounds that asked for them."""

from kvstate.protocol import Sampling, Top
from router.sequence import MOST_TOPS, TOPS_EVERY, RunningSequence


def sequence(num_top: int = 16) -> RunningSequence:
    return RunningSequence(1, [5] * 10, 10, Sampling(), {}, num_top=num_top)


def top(position: int) -> Top:
    return ((position, 1.0),)


def commit(running: RunningSequence, num_tokens: int, stated: bool = True) -> None:
    start = len(running.tokens)
    running.keep_tops([top(p) for p in range(start, start + num_tokens)] if stated else [])
    running.tokens.extend([5] * num_tokens)


def test_tops_stand_at_their_positions_and_others_are_empty() -> None:
    running = sequence()
    commit(running, 3)
    commit(running, 2, stated=False)
    commit(running, 1)
    assert running.last_tops(7) == [(), top(10), top(11), top(12), (), (), top(15)]


def test_only_the_last_positions_are_kept() -> None:
    running = sequence()
    for num_tokens in (1, 9, 40, 40):
        commit(running, num_tokens)
    assert sorted(running.target_tops) == list(range(100 - MOST_TOPS, 100))
    assert running.last_tops(MOST_TOPS) == [top(p) for p in range(100 - MOST_TOPS, 100)]


def test_one_round_in_some_asks_the_target() -> None:
    asking, silent = sequence(), sequence(num_top=0)
    asked: list[int] = []
    for _ in range(2 * TOPS_EVERY):
        asked.append(asking.num_top_of_check)
        assert silent.num_top_of_check == 0
        asking.begin_round()
        silent.begin_round()
    assert asked == 2 * [16, *[0] * (TOPS_EVERY - 1)]
