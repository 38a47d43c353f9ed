"""The emulated model against its definition: letters come from the cached prefix, pairs agree, time is exact."""

import random
import statistics
import time
from dataclasses import replace

import pytest

from kvstate.protocol import Sampling
from models.backend import GuessSink, Slice
from models.emulated import EOS, AgreementByPrompt, EmulatedBackend, EmulateSpec, Voice, guess, reference
from models.hashing import ROOT, mix

SAMPLING = Sampling()


def no_sleep(duration_s: float) -> None:
    del duration_s


def backend(spec: EmulateSpec, name: str = "m", rank: int = 0, num_blocks: int = 512) -> EmulatedBackend:
    return EmulatedBackend(name, rank, spec, num_blocks, block_tokens=4, sleep=no_sleep)


def rows(
    tokens: list[int], start: int, blocks: list[int], sample_from: int | None = None, prompt_len: int = 1
) -> Slice:
    first = start if sample_from is None else sample_from
    return Slice(tokens, start, len(tokens), first, prompt_len, blocks, SAMPLING)


def target_letters(tokens: list[int]) -> list[int]:
    """The reference after each position, from the definition alone."""
    state, letters = ROOT, []
    for token in tokens:
        state = mix(state, token)
        letters.append(reference(state))
    return letters


def test_target_emits_the_reference_however_rows_are_split() -> None:
    tokens = list(b"The quick brown fox")
    target = backend(EmulateSpec(1.0, 1.0))
    blocks = [7, 2, 5, 0, 9]
    first = target.forward([rows(tokens[:6], 0, blocks)])[0]
    rest = target.forward([rows(tokens, 6, blocks)])[0]
    assert first + rest == target_letters(tokens)
    assert set(first + rest) <= set(b"abcdefghijklmnopqrstuvwxyz ")


def test_samples_only_where_asked() -> None:
    tokens = list(b"abcdefgh")
    target = backend(EmulateSpec(1.0, 1.0))
    samples, nothing = target.forward([rows(tokens, 0, [0, 1], sample_from=6), rows(tokens, 0, [2, 3], sample_from=8)])
    assert samples == target_letters(tokens)[6:]
    assert nothing == []


def test_stale_or_foreign_kv_gives_wrong_letters() -> None:
    tokens = list(b"abcdefgh")
    target = backend(EmulateSpec(1.0, 1.0))
    target.forward([rows(tokens, 0, [0, 1])])
    continuation = [*tokens, *b"xyzxyzxyz"]
    right = target.forward([rows(continuation, 8, [0, 1, 2, 3, 4])])[0]
    foreign = target.forward([rows(continuation, 8, [1, 0, 2, 3, 4])])[0]
    assert right == target_letters(continuation)[8:]
    assert foreign != right


def test_rollback_by_overwriting() -> None:
    target = backend(EmulateSpec(1.0, 1.0))
    target.forward([rows(list(b"abcdWRONG"), 0, [3, 4, 5])])
    tokens = list(b"abcdright")
    assert target.forward([rows(tokens, 4, [3, 4, 5])])[0] == target_letters(tokens)[4:]


@pytest.mark.parametrize("errors", ["shared", "own"])
@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_pairs_agree_as_promised(errors: str, spread: float) -> None:
    agreements = (0.55, 0.85, 1.0)
    count = 20_000
    voices = [Voice(mix(99, rank), rank, errors == "own", spread) for rank in range(3)]
    contexts = [mix(ROOT, random.Random(5).getrandbits(40) + i) for i in range(count)]
    tokens = [[guess(h, a, v).token for h in contexts] for a, v in zip(agreements, voices, strict=True)]
    assert tokens[2] == [reference(h) for h in contexts]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        measured = statistics.fmean(a == b for a, b in zip(tokens[i], tokens[j], strict=True))
        shared, own = 1 - abs(agreements[i] - agreements[j]), agreements[i] * agreements[j]
        if spread and errors == "shared" and (i, j) == (0, 1):
            assert measured < shared  # wrong letters differ by rank
        else:
            assert measured == pytest.approx(shared if errors == "shared" else own, abs=0.012)


def test_confidence_is_calibrated_and_the_second_letter_is_right_half_of_the_time() -> None:
    voice = Voice(mix(1, 1), 1, True, 0.2)
    guesses = [(guess(mix(ROOT, i), 0.6, voice), reference(mix(ROOT, i))) for i in range(20_000)]
    sure = [g.token == best for g, best in guesses if g.confidence > 0.7]
    unsure = [g.token == best for g, best in guesses if g.confidence < 0.5]
    assert statistics.fmean(sure) == pytest.approx(0.75, abs=0.02)
    assert statistics.fmean(unsure) == pytest.approx(0.45, abs=0.02)
    assert all(0.4 <= g.confidence <= 0.8 and g.second != g.token for g, _ in guesses)
    rescued = [g.second == best for g, best in guesses if g.token != best]
    assert statistics.fmean(rescued) == pytest.approx(0.5, abs=0.02)


def test_eos_is_the_sample_at_its_output_index() -> None:
    drafter = backend(EmulateSpec(1.0, 0.3, eos_after=2))
    samples = drafter.forward([rows(list(b"prompt12345"), 0, [0, 1, 2], prompt_len=6)])[0]
    # The row at 7 samples position 8, output index 2.
    assert [row for row, token in enumerate(samples) if token == EOS] == [7]


def test_the_longest_prompt_prefix_decides() -> None:
    table = AgreementByPrompt({"code": 0.9, "code:py": 0.5, "default": 0.1})
    assert table.of(list(b"code:py x"), 9) == 0.5
    assert table.of(list(b"code:c x"), 8) == 0.9
    assert table.of(list(b"cod"), 3) == 0.1
    assert table.of(list(b"code"), 3) == 0.1  # the `e` is output already
    with pytest.raises(ValueError, match="default"):
        AgreementByPrompt({"code": 0.9})


def test_live_update_changes_answers_but_not_kv() -> None:
    tokens = list(b"live update of the agreement, long enough to err in it")
    drafter = backend(EmulateSpec(1.0, 0.1))
    before = drafter.forward([rows(tokens, 0, list(range(20)))])[0]
    drafter.update(EmulateSpec(1.0, 1.0))
    after = drafter.forward([rows(tokens, 30, list(range(20)))])[0]
    assert before != target_letters(tokens)
    assert after == target_letters(tokens)[30:]


def test_time_follows_rows_and_sequences() -> None:
    asked: list[float] = []
    spec = EmulateSpec(base_ms=20.0, agreement=1.0, per_token_ms=2.0, per_sequence_ms=5.0)
    timed = EmulatedBackend("m", 0, spec, 16, block_tokens=4, sleep=asked.append)
    started = time.perf_counter()
    timed.forward([rows([1, 2, 3], 0, [0]), rows([1], 0, [1])])
    own_s = time.perf_counter() - started
    assert 0.038 - own_s <= asked[0] < 0.038  # 20 + 2 · 4 + 5 · 2 ms, less what the hashing took


def test_two_milliseconds_mean_two() -> None:
    precise = EmulatedBackend("m", 0, EmulateSpec(2.0, 1.0), 4)
    took = []
    for _ in range(60):
        started = time.perf_counter()
        precise.forward([rows([1, 2], 0, [0])])
        took.append((time.perf_counter() - started) * 1e3)
    assert min(took) >= 2.0
    assert sorted(took)[15] < 2.05


def test_guesses_state_the_sample_with_its_confidence_and_a_second_letter_right_half_of_the_time() -> None:
    tokens, sink = list(b"any text that is long enough to tell one rate from another ") * 20, GuessSink(2)
    model = backend(EmulateSpec(1.0, 0.7, errors="own", confidence_spread=0.2), num_blocks=512)
    [samples] = model.forward([replace(rows(tokens, 0, list(range(512))), guesses=sink)])
    right = target_letters(tokens)
    assert [stated[0][0] for stated in sink.rows] == samples
    confidences = [stated[0][1] for stated in sink.rows]
    assert 0.5 <= min(confidences) <= max(confidences) <= 0.9
    assert statistics.fmean(confidences) == pytest.approx(0.7, abs=0.02)
    wrong = [(stated, r) for stated, r in zip(sink.rows, right, strict=True) if stated[0][0] != r]
    seconds = [stated[1][0] == r for stated, r in wrong]
    assert statistics.fmean(seconds) == pytest.approx(0.5, abs=0.08)
