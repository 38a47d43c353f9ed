"""Random messages to one engine, trees among them, against texts and hash chains that are recomputed from scratch.

Several sequences share few blocks, so that they evict each other, and a forward has few rows, so that a tree waits for
the tokens before it: then a newer step, a commit, an eviction or a close comes in between.
"""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstate.protocol import Check, Close, Commit, Draft, Drafted, Key, Message, Open, Sampling, Verdict
from models.emulated import EmulatedBackend, EmulateSpec, reference
from models.engine import Engine
from models.hashing import ROOT, mix
from models.trees import Tree
from tests.models.test_trees import random_tree

MOST_TOKENS = 110
STEPS = ("tree", "chain", "draft")
BETWEEN = ("step", "commit", "evict", "close")


def chain_of(tokens: Sequence[int]) -> list[int]:
    hashes = [ROOT]
    for token in tokens:
        hashes.append(mix(hashes[-1], token))
    return hashes[1:]


def text_after(prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(reference(chain_of(text)[-1]))
    return text


class Known:
    """What a router knows of a sequence, and its whole right text. `acked_len`: what its holder last acknowledged."""

    def __init__(self, seq: int, text: Sequence[int], committed_len: int) -> None:
        self.seq, self.text, self.committed_len, self.acked_len = seq, list(text), committed_len, committed_len
        self.step = 0

    def key(self) -> Key:
        self.step += 1
        return Key(self.step, self.step)

    @property
    def given(self) -> tuple[int, ...]:
        return tuple(self.text[self.acked_len : self.committed_len])

    def tree(self, rng: random.Random) -> Check:
        tree = random_tree(rng, self.text[self.committed_len :], rng.randrange(1, 13), 256)
        return self.check(tree.tokens, tree.parents)

    def chain(self, rng: random.Random) -> Check:
        right = rng.randrange(6)
        tokens = [*self.text[self.committed_len : self.committed_len + right], *([0] * rng.randrange(3))]
        return self.check(tokens)

    def check(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> Check:
        lengths = (self.committed_len, self.acked_len)
        return Check(self.seq, self.key(), *lengths, (*self.given, *tokens), len(tokens), parents=tuple(parents))

    def draft(self, rng: random.Random) -> Draft:
        lengths = (self.committed_len, self.acked_len)
        return Draft(self.seq, self.key(), *lengths, self.given, rng.randrange(1, 5))


class World:
    def __init__(self) -> None:
        self.backend = EmulatedBackend("t", 1, EmulateSpec(0.0, 1.0), 14, sleep=lambda _: None)
        self.engine = Engine(self.backend, self._deliver, max_rows=13)
        self.replies: list[Message] = []
        self.overtaken = self.accepted = self.rejected = 0
        self.sequences = [
            self._opened(i, text_after(range(length), MOST_TOKENS), length) for i, length in enumerate((2, 30, 30))
        ]

    def _deliver(self, replies: Sequence[tuple[object, Message]]) -> None:
        self.replies += [message for _, message in replies]

    def _opened(self, seq: int, text: Sequence[int], prompt_len: int, committed_len: int | None = None) -> Known:
        length = prompt_len if committed_len is None else committed_len
        self.engine.submit("router", [Open(seq, tuple(text[:length]), prompt_len, Sampling())])
        return Known(seq, text, length)

    def idle(self) -> None:
        while self.engine.step():
            self.check_integrity()
        self.check_integrity()

    def reopen(self, place: int) -> None:
        old = self.sequences[place]
        prompt_len = 2 if place == 0 else 30
        self.engine.submit("router", [Close(old.seq)])
        self.sequences[place] = self._opened(old.seq + 3, old.text, prompt_len, old.committed_len)

    def commit(self, one: Known, rng: random.Random) -> None:
        """By another holder's verdict."""
        one.committed_len += rng.randrange(1, 4)
        self.engine.submit("router", [Commit(one.seq, one.step, one.acked_len, one.given)])

    def serve(self, kind: str, places: Sequence[int], rng: random.Random) -> None:
        """One step of each of these sequences, in one batch, answered."""
        steps = [getattr(self.sequences[place], kind)(rng) for place in places]
        self.engine.submit("router", steps)
        self.idle()
        asked = {step.key: step for step in steps}
        replies = {(r.seq, r.key): r for r in self.replies if isinstance(r, Verdict | Drafted) and r.key in asked}
        for place, step in zip(places, steps, strict=True):
            self.answered(self.sequences[place], step, replies[step.seq, step.key])

    def answered(self, one: Known, step: Check | Draft, reply: Verdict | Drafted) -> None:
        one.acked_len = reply.committed_len
        if isinstance(reply, Drafted):
            tokens = list(reply.tokens)
        else:
            assert isinstance(step, Check)
            nodes = step.tokens[len(step.tokens) - step.count :]
            path = reply.path if step.parents else range(reply.num_accepted)
            tokens = [*(nodes[node] for node in path), reply.own_token]
            self.accepted, self.rejected = self.accepted + len(tokens) - 1, self.rejected + step.count - len(tokens) + 1
            self.longest_path(one, step, len(path))
        assert tokens == one.text[one.committed_len : one.committed_len + len(tokens)]
        if isinstance(reply, Verdict):
            one.committed_len += len(tokens)

    def longest_path(self, one: Known, step: Check, num_accepted: int) -> None:
        """No right path is longer, unless branches were left out for want of blocks."""
        if not step.parents or self.engine._blocks.free_blocks < 12:
            return
        tree, right = Tree(step.tokens[-step.count :], step.parents), one.text[one.committed_len :]
        paths = [[tree.tokens[n] for n in tree.ancestors(node)] for node in range(step.count)]
        assert num_accepted == max([len(path) for path in paths if path == right[: len(path)]], default=0)

    def interrupt(self, place: int, between: str, rng: random.Random) -> None:
        """A tree whose known tokens take several forwards, and what comes after the first of them."""
        one = self.sequences[place]
        self.engine.control(lambda: self.engine.evict(one.seq))
        step = one.tree(rng)
        self.engine.submit("router", [step])
        self.engine.step()
        waits = any(task.step is step for task in self.engine._tasks)
        self.overtaken += waits
        match between:
            case "step":
                self.engine.submit("router", [one.chain(rng)])
            case "commit":
                self.commit(one, rng)
            case "evict":
                self.engine.control(lambda: self.engine.evict(one.seq))
            case "close":
                self.reopen(place)
        self.idle()
        answers = [r for r in self.replies if isinstance(r, Verdict) and (r.seq, r.key) == (step.seq, step.key)]
        assert len(answers) <= 1
        assert not waits or bool(answers) == (between == "evict")

    def check_integrity(self) -> None:
        engine, size = self.engine, self.backend.block_tokens
        engine._blocks.check_integrity()
        assert min(engine._blocks._tables, default=0) >= 0, "blocks of a tree were given back"
        for seq, holding in engine._holdings.items():
            state, table = holding.state, engine._blocks.blocks(seq)
            state.check_integrity()
            found = [self.backend._kv[table[p // size] * size + p % size] for p in range(state.kv_len)]
            assert found == chain_of(state.tokens[: state.kv_len])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from((*STEPS, *BETWEEN)), st.integers(0, 2)), min_size=4, max_size=25),
    st.integers(0, 2**32),
)
def test_any_messages_leave_the_right_text_and_the_right_kv(operations: list[tuple[str, int]], seed: int) -> None:
    rng, world = random.Random(seed), World()
    world.idle()
    for name, place in operations:
        world.replies.clear()
        if any(one.committed_len > MOST_TOKENS - 20 for one in world.sequences):
            break
        if name in STEPS:
            world.serve(name, rng.sample(range(3), rng.randrange(1, 4)), rng)
        else:
            world.interrupt(place, name, rng)
            world.serve(rng.choice(STEPS), [place], rng)
    for one in world.sequences:
        world.engine.submit("router", [Close(one.seq)])
    world.idle()
    assert world.engine._blocks.used_blocks == 0


def test_trees_are_accepted_rejected_and_overtaken() -> None:
    """That the random messages above do what they are for."""
    rng, world = random.Random(1), World()
    world.idle()
    for between in BETWEEN:
        world.replies.clear()
        world.interrupt(1, between, rng)
        world.serve("tree", [0, 1, 2], rng)
    assert min(world.overtaken, world.accepted, world.rejected, world.engine.stats.evicted_sequences) > 3
