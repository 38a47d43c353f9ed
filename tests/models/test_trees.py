"""Trees of drafted tokens in one forward: each path is checked as if it were the only one, to the bit."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstate.protocol import Acked, Check, Close, Commit, Draft, Drafted, Key, Message, Need, Open, Sampling, Verdict
from kvstate.sequence import MalformedStep, SequenceState, accept_step, apply_open
from models.backend import Backend
from models.emulated import EmulatedBackend, EmulateSpec
from models.engine import Engine
from models.transformers_backend import TransformersBackend
from models.trees import Branch, Tree
from tests.models.test_transformers_backend import FAMILIES, save

SEEDED = Sampling(0.8, seed=5, repetition_penalty=1.1, frequency_penalty=0.2)


def random_tree(rng: random.Random, text: Sequence[int], num_nodes: int, vocabulary: int) -> Tree:
    """Grown from the true continuation `text` and wrong tokens, so that accepted paths have all lengths."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    while len(tokens) < num_nodes:
        parent = rng.randrange(-1, len(tokens))
        depth = 0 if parent < 0 else depths[parent] + 1
        token = text[depth] if rng.random() < 0.6 and depth < len(text) else rng.randrange(vocabulary)
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
    return Tree(tuple(tokens), tuple(parents))


class Client:
    """One sequence's router, to an engine that answers at once."""

    def __init__(self, backend: Backend, seq: int = 1) -> None:
        self.engine = Engine(backend, self._deliver)
        self.seq, self.step, self.known = seq, 0, 0
        self.replies: list[Message] = []

    def _deliver(self, replies: Sequence[tuple[object, Message]]) -> None:
        self.replies += [message for _, message in replies]

    def send(self, *messages: Message) -> list[Message]:
        self.replies = []
        self.engine.submit("router", messages)
        while self.engine.step():
            pass
        return self.replies

    def open(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self.send(Open(self.seq, tuple(prompt), len(prompt), sampling))
        self.known = len(prompt)

    def check(self, committed: Sequence[int], tokens: Sequence[int], parents: Sequence[int] = ()) -> Verdict:
        """After the whole committed text; the holder is given what it did not know."""
        self.step += 1
        given = (*committed[self.known :], *tokens)
        key = Key(self.step, self.step)
        message = Check(
            self.seq, key, len(committed), self.known, given, len(tokens), logprobs=3, num_top=2, parents=tuple(parents)
        )
        [reply] = self.send(message)
        assert isinstance(reply, Verdict), reply
        self.known = reply.committed_len
        return reply


def continuation(backend: Backend, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """One token at a time."""
    client, text = Client(backend), list(prompt)
    client.open(prompt, sampling)
    for _ in range(count):
        text.append(client.check(text, ()).own_token)
    client.send(Close(1))
    return text[len(prompt) :]


def emulated() -> EmulatedBackend:
    return EmulatedBackend("t", 1, EmulateSpec(0.0, 1.0), 400, sleep=lambda _: None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save(tmp_path_factory.mktemp(name), FAMILIES[name]()) for name in ("llama", "qwen3", "phi", "sliding")
    }


def load(folder: Path, dtype: torch.dtype, quantization: str = "none") -> TransformersBackend:
    return TransformersBackend(
        folder, dtype=dtype, device="cpu", num_blocks=lambda: 128, block_tokens=16, quantization=quantization
    )


def test_branches_are_runs_of_nodes_parents_first() -> None:
    tree = Tree((1, 2, 3, 4, 5, 6), (-1, 0, 1, 0, 3, -1))
    assert tree.branches() == [Branch((0, 1, 2), None), Branch((3, 4), 0), Branch((5,), None)]
    assert tree.depth == 3
    assert tree.ancestors(4) == [0, 3, 4]


def test_the_accepted_path_follows_samples_and_stops_at_the_first_that_no_child_equals() -> None:
    tree = Tree((1, 2, 3, 4, 5, 6), (-1, 0, 1, 0, 3, -1))
    assert tree.accepted({-1: 1, 0: 4, 3: 9, 1: 3}) == [0, 3]
    assert tree.accepted({-1: 6, 5: 6}) == [5]
    assert tree.accepted({-1: 7}) == []


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 40))
def test_rounds_of_random_trees_give_the_targets_text(seed: int, num_nodes: int, prompt_len: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(256) for _ in range(prompt_len)]
    text = continuation(emulated(), prompt, Sampling(), 60)
    client, committed = Client(emulated()), list(prompt)
    client.open(prompt, Sampling())
    committed.append(client.check(committed, ()).own_token)
    while len(committed) < prompt_len + 40:
        tree = random_tree(rng, text[len(committed) - prompt_len :], num_nodes, 256)
        verdict = client.check(committed, tree.tokens, tree.parents)
        committed += [*(tree.tokens[node] for node in verdict.path), verdict.own_token]
        assert verdict.num_accepted == len(verdict.path)
        assert committed == [*prompt, *text[: len(committed) - prompt_len]]
        assert (verdict.kv_len, verdict.timing.rows) == (len(committed) - 1, num_nodes + 1)
        client.engine._blocks.check_integrity()
    client.send(Close(1))
    assert client.engine._blocks.used_blocks == 0


EXACT = [
    ("llama", torch.float64, "none"),
    ("sliding", torch.float64, "none"),
    ("llama", torch.float32, "none"),
    ("qwen3", torch.float32, "none"),
    ("phi", torch.float32, "none"),
    ("sliding", torch.bfloat16, "none"),
    ("llama", torch.bfloat16, "none"),
    ("llama", torch.bfloat16, "int8"),
    ("llama", torch.bfloat16, "int4"),
]


def assert_same(plain: Verdict, tree: Verdict, row: int, dtype: torch.dtype) -> None:
    """To the bit where the kernels are ours; torch's in float64 round by the number of rows."""
    if dtype == torch.float64:
        assert plain.logprobs[0].logprob == pytest.approx(tree.logprobs[row].logprob, abs=1e-9)
    else:
        assert plain.logprobs[0] == tree.logprobs[row]


@pytest.mark.parametrize(("family", "dtype", "quantization"), EXACT)
@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_each_accepted_path_has_the_logprobs_of_plain_decoding(
    folders: dict[str, Path], family: str, dtype: torch.dtype, quantization: str, sampling: Sampling
) -> None:
    rng, prompt = random.Random(7), [1, *range(30, 41)]
    trees, plain = (Client(load(folders[family], dtype, quantization)) for _ in range(2))
    text = continuation(load(folders[family], dtype, quantization), prompt, sampling, 80)
    for client in (trees, plain):
        client.open(prompt, sampling)
    committed = [*prompt, trees.check(prompt, ()).own_token]
    assert plain.check(prompt, ()).own_token == committed[-1] == text[0]
    lengths = set()
    while len(committed) < len(prompt) + 60:
        tree = random_tree(rng, text[len(committed) - len(prompt) :], rng.randrange(1, 14), 128)
        verdict = trees.check(committed, tree.tokens, tree.parents)
        for i, node in enumerate(verdict.path):
            one = plain.check([*committed, *(tree.tokens[n] for n in verdict.path[:i])], ())
            assert one.own_token == tree.tokens[node]
            assert_same(one, verdict, i, dtype)
            if dtype != torch.float64:
                assert one.tops[0] == verdict.tops[i]
        committed += [*(tree.tokens[node] for node in verdict.path)]
        last = plain.check(committed, ())
        assert last.own_token == verdict.own_token
        assert_same(last, verdict, -1, dtype)
        committed.append(verdict.own_token)
        lengths.add(verdict.num_accepted)
    assert committed == [*prompt, *text[: len(committed) - len(prompt)]]
    assert len(lengths) > 2, "trees of all kinds were tried"


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [("llama", torch.float32, "none"), ("sliding", torch.bfloat16, "none"), ("llama", torch.bfloat16, "int4")],
)
def test_drafts_after_trees_over_a_cached_prompt_equal_plain_decoding(
    folders: dict[str, Path], family: str, dtype: torch.dtype, quantization: str
) -> None:
    """The second sequence begins with the first one's blocks; neither writes into them."""
    prompt, rng = [1, *range(30, 70)], random.Random(5)
    text = continuation(load(folders[family], dtype, quantization), prompt, SEEDED, 60)
    first = Client(load(folders[family], dtype, quantization))
    second = Client(first.engine._backend, seq=2)
    second.engine = first.engine

    def deliver(replies: Sequence[tuple[object, Message]]) -> None:
        for client in (first, second):
            client._deliver(replies)

    first.engine._deliver = deliver
    for client in (first, second):
        client.open(prompt, SEEDED)
        client.check(prompt, ())
    assert first.engine.stats.cached_tokens == 32
    lengths = {1: 1, 2: 1}  # of each text, so far
    for _ in range(6):
        for client in (first, second):
            length = lengths[client.seq]
            tree = random_tree(rng, text[length:], 9, 128)
            verdict = client.check([*prompt, *text[:length]], tree.tokens, tree.parents)
            length += verdict.num_accepted + 1
            assert [*(tree.tokens[n] for n in verdict.path), verdict.own_token] == text[lengths[client.seq] : length]
            client.step += 1
            given, key = tuple(text[client.known - len(prompt) : length]), Key(client.step, client.step)
            draft = Draft(client.seq, key, len(prompt) + length, client.known, given, 3)
            [reply] = client.send(draft)
            assert isinstance(reply, Drafted)
            assert list(reply.tokens) == text[length : length + 3]
            client.known, lengths[client.seq] = reply.committed_len, length
    assert max(lengths.values()) > 16, "texts reach a further block"


def test_trees_of_several_sequences_share_a_forward() -> None:
    backend, prompts = emulated(), {1: [5, 6, 7], 2: list(range(40)), 3: [9] * 16}
    texts = {seq: continuation(emulated(), prompt, Sampling(), 12) for seq, prompt in prompts.items()}
    client = Client(backend)
    client.send(*(Open(seq, tuple(prompt), len(prompt), Sampling()) for seq, prompt in prompts.items()))
    client.send(*(Check(seq, Key(1, 1), len(p), len(p), (), 0) for seq, p in prompts.items()))
    rng, messages, trees = random.Random(3), [], {}
    for seq, prompt in prompts.items():
        trees[seq] = random_tree(rng, texts[seq][1:], 9, 256)
        tokens = (texts[seq][0], *trees[seq].tokens)
        messages.append(Check(seq, Key(2, 2), len(prompt) + 1, len(prompt), tokens, 9, parents=trees[seq].parents))
    forwards = client.engine.stats.forwards
    verdicts = client.send(*messages)
    assert client.engine.stats.forwards == forwards + 1
    for verdict in verdicts:
        assert isinstance(verdict, Verdict)
        tree, text = trees[verdict.seq], texts[verdict.seq]
        given_text = [*(tree.tokens[node] for node in verdict.path), verdict.own_token]
        assert given_text == text[1 : 1 + len(given_text)]
    assert client.engine.stats.most_sequences_in_forward == 3


def test_a_tree_after_tokens_that_the_holder_lacks_computes_them_first() -> None:
    prompt = list(range(20))
    text = continuation(emulated(), prompt, Sampling(), 60)
    client = Client(emulated())
    client.open(prompt, Sampling())
    tree = Tree((text[40], 0, text[41]), (-1, -1, 0))
    verdict = client.check([*prompt, *text[:40]], tree.tokens, tree.parents)
    assert verdict.path == (0, 2)
    assert verdict.own_token == text[42]


def test_branches_without_blocks_are_left_out_and_the_first_is_checked() -> None:
    prompt = list(range(30))
    text = continuation(emulated(), prompt, Sampling(), 8)
    client = Client(EmulatedBackend("t", 1, EmulateSpec(0.0, 1.0), 3, sleep=lambda _: None))
    client.open(prompt, Sampling())
    tree = Tree((text[0], 0, text[1], 1, 2), (-1, -1, 0, -1, 0))
    verdict = client.check(prompt, tree.tokens, tree.parents)
    assert verdict.path == (0, 2)
    assert verdict.own_token == text[2]


@pytest.mark.parametrize("by", ["step", "commit", "close"])
def test_a_tree_that_is_overtaken_leaves_the_sequence_as_it_was(by: str) -> None:
    prompt = list(range(18))
    text = continuation(emulated(), prompt, Sampling(), 30)
    client, committed = Client(emulated()), [*prompt, text[0]]
    client.open(prompt, Sampling())
    client.check(prompt, ())
    tree = Tree((3, 4, text[1]), (-1, 0, -1))
    overtaken = Check(1, Key(2, 2), 19, 18, (text[0], *tree.tokens), 3, parents=tree.parents)
    client.step = 3
    if by == "step":
        newer = Draft(1, Key(3, 3), 19, 18, (text[0],), 2)
        client.send(overtaken, newer)
    elif by == "commit":
        client.send(overtaken, Commit(1, 2, 18, tuple(text[:4])))
        committed = [*prompt, *text[:4]]
    else:
        client.send(overtaken, Close(1), Open(1, tuple(prompt), 18, Sampling()))
        client.known = 18
    rest = client.check(committed, ())
    assert rest.own_token == text[len(committed) - 18]
    client.engine._blocks.check_integrity()


@pytest.mark.parametrize(
    ("tokens", "parents"), [((1, 2), (-1, 1)), ((1, 2), (-1,)), ((1, 1), (-1, -1)), ((1, 2), (0, -1)), ((1,), (-2,))]
)
def test_what_is_no_tree_is_malformed(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    state = SequenceState(1)
    apply_open(state, Open(1, (5, 6), 2, Sampling()))
    step = Check(1, Key(1, 1), 2, 2, tokens, len(tokens), parents=parents)
    with pytest.raises(MalformedStep):
        accept_step(state, step)


@pytest.mark.parametrize(("count", "parents"), [(0, (-1,)), (5, (-1, 0)), (-1, (-1,)), (1, (-1, 0)), (2, (-1,))])
def test_a_count_other_than_the_nodes_is_malformed(count: int, parents: tuple[int, ...]) -> None:
    state = SequenceState(1)
    apply_open(state, Open(1, (5, 6), 2, Sampling()))
    with pytest.raises(MalformedStep):
        accept_step(state, Check(1, Key(1, 1), 2, 2, (7, 8), count, parents=parents))
    assert state.tokens == [5, 6]


@pytest.mark.parametrize("limits", [{"max_rows": 4}, {"prompt_tokens": 20}])
def test_a_tree_that_no_forward_can_check_drops_its_sequence_alone(limits: dict[str, int]) -> None:
    """Too many rows, or for a holder that reads a part of the prompt only: others are served on."""
    client, prompt = Client(emulated()), tuple(range(40))
    client.engine = Engine(emulated(), client._deliver, **limits)  # type: ignore[arg-type]
    client.send(Open(1, prompt, 40, Sampling()), Open(2, prompt, 40, Sampling()))
    tree = Check(1, Key(1, 1), 40, 40, (1, 2, 3, 4), 4, parents=(-1, 0, 1, 2))
    [reply] = client.send(tree, Check(2, Key(1, 1), 40, 40, (), 0))
    assert isinstance(reply, Verdict)
    assert reply.seq == 2
    assert client.engine.report().dropped == (1,)
    client.engine._blocks.check_integrity()


def test_a_tree_as_large_as_a_forward_is_checked() -> None:
    prompt = list(range(40))
    text = continuation(emulated(), prompt, Sampling(), 4)
    client = Client(emulated())
    client.engine = Engine(emulated(), client._deliver, max_rows=4)
    client.open(prompt, Sampling())
    assert client.check(prompt, (text[0], 0, text[1]), (-1, -1, 0)).path == (0, 2)


def test_a_commit_of_another_token_before_the_tree_overtakes_it() -> None:
    """The text is as long as before, but the verdict would be of another."""
    prompt, client = list(range(18)), Client(emulated())
    text = continuation(emulated(), prompt, Sampling(), 4)
    client.open(prompt, Sampling())
    tree = Check(1, Key(1, 1), 18, 18, (text[0] + 1, 3, 4), 2, parents=(-1, -1))
    replies = client.send(tree, Commit(1, 1, 18, (text[0],)))
    assert [type(reply) for reply in replies] == [Acked, Need]
    client.step = 2
    assert client.check([*prompt, text[0]], (0, text[1]), (-1, -1)).path == (1,)


def test_nodes_are_no_tokens_of_the_sequence() -> None:
    state = SequenceState(1)
    apply_open(state, Open(1, (5, 6), 2, Sampling()))
    assert not isinstance(accept_step(state, Check(1, Key(1, 1), 2, 2, (7, 8), 2, parents=(-1, -1))), Need)
    assert state.tokens == [5, 6]
