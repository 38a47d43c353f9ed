"""All cores joined: whatever the chain, the batch, a lost frame or a lost drafter, the text is the target's alone."""

import asyncio
import json
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.identity import SWITCH_ROUNDS, evicting, switching
from benchmarks.inprocess import AUTO, InProcessCluster, RequestFailed, running
from kvstate.protocol import (
    CancelRequest,
    Check,
    Commit,
    Draft,
    FinishReason,
    Message,
    OpenRequest,
    Sampling,
    Speculation,
    Verdict,
)
from models.backend import Backend
from models.emulated import EmulatedBackend, EmulateSpec
from models.ngram import NgramBackend
from models.transformers_backend import TransformersBackend
from router.settings import RouterSettings

PROMPTS = [b"Hello world", b"The quick brown fox jumps over the lazy dog", b"a"]
CHAINS = [("a", "t"), ("b", "t"), ("a", "b", "t"), ("b+a", "t")]
GREEDY = Sampling()


def emulated(agreements: Mapping[str, float], eos_after: int | None = None) -> dict[str, Backend]:
    """Models that differ in agreement and take a fraction of a millisecond."""
    specs = {n: EmulateSpec(base_ms=0.2, agreement=a, eos_after=eos_after) for n, a in agreements.items()}
    return {n: EmulatedBackend(n, rank, spec, 256) for rank, (n, spec) in enumerate(specs.items(), 1)}


def chain_of_three() -> dict[str, Backend]:
    return emulated({"a": 0.6, "b": 0.8, "t": 1.0})


def fixed(chain: tuple[str, ...], window: int = 3) -> Speculation:
    return Speculation("fixed", chain, (window,) * (len(chain) - 1))


async def alone(cluster: InProcessCluster, prompt: bytes, max_tokens: int) -> list[int]:
    return (await cluster.generate(prompt, GREEDY, max_tokens, (256,), Speculation("off"))).tokens


async def nothing_held(cluster: InProcessCluster) -> None:
    async with asyncio.timeout(10.0):
        while any(engine.held() for engine in cluster.engines.values()):  # noqa: ASYNC110 - cores have no event for it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("chain", CHAINS)
async def test_text_is_the_targets_with_accepted_and_rejected_drafts(chain: tuple[str, ...]) -> None:
    async with running(chain_of_three()) as cluster:
        for prompt in PROMPTS:
            output = await cluster.generate(prompt, GREEDY, 60, (256,), fixed(chain))
            assert output.tokens == await alone(cluster, prompt, 60)
            assert output.metrics is not None
            assert 0 < output.metrics.accepted_draft_tokens < output.metrics.draft_tokens


@pytest.mark.parametrize("gather_s", [0.0, 0.002, 60.0])
async def test_tokens_that_wait_for_others_all_come_once_and_the_last_do_not_wait(gather_s: float) -> None:
    async with running(chain_of_three()) as cluster:
        asked = cluster.router.on_ingress

        def gathering(ingress_id: str, message: Message) -> None:
            asked(ingress_id, replace(message, gather_s=gather_s) if isinstance(message, OpenRequest) else message)

        one_by_one = await cluster.generate(PROMPTS[0], GREEDY, 60, (256,), Speculation("off"), logprobs=1)
        cluster.router.on_ingress = gathering  # type: ignore[method-assign]
        output = await cluster.generate(PROMPTS[0], GREEDY, 60, (256,), fixed(("a", "t")), logprobs=1)
        assert (output.tokens, output.logprobs) == (one_by_one.tokens, one_by_one.logprobs)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.metrics is not None
        assert len(output.parts) == {0.0: output.metrics.rounds, 60.0: 1}.get(gather_s, len(output.parts))
        assert gather_s == 0.0 or len(output.parts) <= 1 + output.latency_s / gather_s


async def test_rows_that_accept_different_numbers_do_not_share_an_offset() -> None:
    async with running(chain_of_three()) as cluster:
        wanted = [await alone(cluster, p, 50) for p in PROMPTS]
        many = [cluster.generate(p, GREEDY, 50, (256,), fixed(("a", "b", "t"))) for p in PROMPTS * 3]
        assert [o.tokens for o in await asyncio.gather(*many)] == wanted * 3
        assert cluster.engines["t"].stats.most_sequences_in_forward > 1


async def test_adaptive_learns_and_keeps_the_text() -> None:
    async with running(chain_of_three()) as cluster:
        output = await cluster.generate(PROMPTS[0], GREEDY, 300, (256,))
        assert output.tokens == await alone(cluster, PROMPTS[0], 300)
        assert cluster.router.stats.probes > 0


async def test_settings_change_within_a_request() -> None:
    async with running(chain_of_three()) as cluster:
        request = asyncio.create_task(cluster.generate(PROMPTS[0], GREEDY, 300, (256,)))
        async with asyncio.timeout(10.0):
            while cluster.router.stats.rounds < 5:  # noqa: ASYNC110 - cores have no event for it
                await asyncio.sleep(0.001)
        models = ("a", "b", "t")
        cluster.router.change(RouterSettings(models, policy="fixed", chain=("b", "t"), windows=(2,)))
        output = await request
        assert output.tokens == await alone(cluster, PROMPTS[0], 300)
        assert output.metrics is not None
        assert output.metrics.chain == ("b", "t")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
async def test_length_limit_is_exact(max_tokens: int) -> None:
    async with running(emulated({"a": 1.0, "t": 1.0})) as cluster:
        output = await cluster.generate(PROMPTS[0], GREEDY, max_tokens, (256,), fixed(("a", "t"), 4))
        assert len(output.tokens) == max_tokens
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("eos_after", [0, 1, 4, 9])
async def test_nothing_follows_the_end_of_text(eos_after: int) -> None:
    async with running(emulated({"a": 1.0, "t": 1.0}, eos_after)) as cluster:
        output = await cluster.generate(PROMPTS[0], GREEDY, 50, (256,), fixed(("a", "t"), 4))
        assert len(output.tokens) == eos_after + 1
        assert output.tokens[-1] == 256
        assert output.finish_reason is FinishReason.STOP


async def test_self_draft_accepts_everything() -> None:
    async with running(emulated({"a": 1.0, "t": 1.0})) as cluster:
        output = await cluster.generate(PROMPTS[0], GREEDY, 300, (256,), fixed(("a", "t"), 4))
        assert output.metrics is not None
        assert output.metrics.accepted_draft_tokens == output.metrics.draft_tokens > 200


async def test_a_wrong_block_of_one_is_rejected() -> None:
    async with running(emulated({"a": 0.0, "t": 1.0})) as cluster:
        output = await cluster.generate(PROMPTS[0], GREEDY, 40, (256,), fixed(("a", "t"), 1))
        assert output.tokens == await alone(cluster, PROMPTS[0], 40)
        assert output.metrics is not None
        assert output.metrics.accepted_draft_tokens == 0 < output.metrics.draft_tokens


async def test_lost_frames_cost_time_only() -> None:
    lost: list[str] = []

    def lose(to: str, message: Message) -> bool:
        kinds = (Draft, Check, Verdict, Commit)
        unlucky = isinstance(message, kinds) and kinds.index(type(message)) not in [kinds.index(k) for k in seen]
        if unlucky:
            seen.add(type(message))
            lost.append(to)
        return unlucky

    seen: set[type] = set()
    backends = chain_of_three()
    settings = RouterSettings(tuple(backends), step_timeout_s=0.3)
    async with running(backends, settings, lose) as cluster:
        output = await cluster.generate(PROMPTS[0], GREEDY, 400, (256,), fixed(("a", "t")))
        assert output.tokens == await alone(cluster, PROMPTS[0], 400)
    assert len(lost) == 4


async def test_a_lost_drafter_shrinks_the_chain() -> None:
    async with running(chain_of_three()) as cluster:
        wanted = await alone(cluster, PROMPTS[1], 80)
        got: list[int] = []
        async for part in cluster.stream(PROMPTS[1], GREEDY, 80, (256,), fixed(("a", "b", "t"))):
            got.extend(part.tokens)
            if len(got) > 20 and "a" in cluster.engines:
                cluster.lose_replica("a")
        assert got == wanted
        assert cluster.router.stats.replica_losses["a"] == 1


async def test_a_request_cancelled_in_its_first_tick_leaves_no_place_in_the_queue() -> None:
    async with running(chain_of_three()) as cluster:
        for i in range(5):
            request = OpenRequest(f"r{i}", (1, 2), GREEDY, 4, (), 60.0, (), Speculation())
            cluster.router.on_ingress("test", request)
            cluster.router.on_ingress("test", CancelRequest(f"r{i}"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (cluster.router.num_open, cluster.router.num_queued) == (0, 0)


async def test_a_request_that_never_fits_is_refused_at_once() -> None:
    async with running(chain_of_three()) as cluster:
        with pytest.raises(RequestFailed, match="fit on no replica of t") as caught:
            await cluster.generate(PROMPTS[0], GREEDY, 100_000)
        assert caught.value.code == 400


async def test_every_holder_ends_at_the_committed_length_and_frees_it() -> None:
    slow = {"a": EmulateSpec(5.0, 0.6), "b": EmulateSpec(5.0, 0.8), "t": EmulateSpec(5.0, 1.0)}
    backends = {n: EmulatedBackend(n, rank, spec, 256) for rank, (n, spec) in enumerate(slow.items(), 1)}
    async with running(backends) as cluster:
        async for part in cluster.stream(PROMPTS[0], GREEDY, 2000, (256,), fixed(("a", "t"))):
            if part.finish_reason is None and part.from_index > 30:
                (seq,) = cluster.coordinator.ledger.running
                async with asyncio.timeout(10.0):
                    while not cluster.coordinator.converged(seq):  # noqa: ASYNC110 - cores have no event for it
                        await asyncio.sleep(0.001)
                break
        await nothing_held(cluster)
        assert [engine.report().sequences for engine in cluster.engines.values()] == [0, 0, 0]


async def test_case_16_a_drafter_with_too_short_a_context_is_left_out_of_that_request_only() -> None:
    specs = {"a": EmulateSpec(0.2, 0.6, context_len=64), "b": EmulateSpec(0.2, 0.8), "t": EmulateSpec(0.2, 1.0)}
    backends = {n: EmulatedBackend(n, rank, spec, 256) for rank, (n, spec) in enumerate(specs.items(), 1)}
    long, short = PROMPTS[1] * 5, b"short"
    async with running(backends) as cluster:
        wanted = [await alone(cluster, prompt, 40) for prompt in (long, short)]
        for speculation in (AUTO, fixed(("a", "b", "t"))):
            many = [cluster.generate(prompt, GREEDY, 40, (256,), speculation) for prompt in (long, short, long)]
            outputs = await asyncio.gather(*many)
            assert [o.tokens for o in outputs] == [wanted[0], wanted[1], wanted[0]]
            chains = [o.metrics.chain for o in outputs if o.metrics is not None]
            assert all("a" not in chain for chain in (chains[0], chains[2]))
        assert chains[0] == ("b", "t")
        assert chains[1] == ("a", "b", "t")


@pytest.mark.parametrize("num_blocks", [12, 25])
async def test_case_17_requests_wait_for_room_and_end_with_the_same_text(num_blocks: int) -> None:
    specs = {"a": EmulateSpec(0.2, 0.7), "t": EmulateSpec(0.2, 1.0)}
    backends = {n: EmulatedBackend(n, rank, spec, num_blocks) for rank, (n, spec) in enumerate(specs.items(), 1)}
    prompts = [bytes([65 + i]) * (60 + 7 * i) for i in range(8)]
    async with running(backends) as cluster:
        wanted = [await alone(cluster, prompt, 60) for prompt in prompts]
        many = [cluster.generate(p, GREEDY, 60, (256,), fixed(("a", "t"))) for p in prompts]
        assert [o.tokens for o in await asyncio.gather(*many)] == wanted


@pytest.mark.parametrize("chain", CHAINS)
async def test_kv_that_is_evicted_all_the_time_is_made_again_with_the_same_text(chain: tuple[str, ...]) -> None:
    async with running(chain_of_three()) as cluster:
        wanted = [await alone(cluster, prompt, 60) for prompt in PROMPTS]
        before = sum(engine.stats.evicted_sequences for engine in cluster.engines.values())
        async with evicting(cluster, every_s=0.005):
            outputs = await asyncio.gather(
                *(cluster.generate(prompt, GREEDY, 60, (256,), fixed(chain)) for prompt in PROMPTS)
            )
        assert [output.tokens for output in outputs] == wanted
        assert sum(engine.stats.evicted_sequences for engine in cluster.engines.values()) > before


async def test_chains_that_take_turns_within_each_request_keep_the_text() -> None:
    async with running(chain_of_three()) as cluster:
        wanted = [await alone(cluster, prompt, 120) for prompt in PROMPTS]
        before = cluster.router.stats.chain_rounds.copy()
        with switching(cluster, [fixed(chain) for chain in CHAINS]):
            outputs = await asyncio.gather(*(cluster.generate(prompt, GREEDY, 120, (256,)) for prompt in PROMPTS))
        assert [output.tokens for output in outputs] == wanted
        rounds = cluster.router.stats.chain_rounds - before
        assert all(rounds[chain] >= SWITCH_ROUNDS for chain in CHAINS), rounds


async def test_sequences_that_started_apart_come_to_share_their_forwards() -> None:
    backend = EmulatedBackend("t", 1, EmulateSpec(base_ms=40.0, agreement=1.0), 256)
    async with running({"t": backend}) as cluster:
        parts = cluster.stream(PROMPTS[0], GREEDY, 40, (256,), Speculation("off"))
        await anext(parts)
        later = asyncio.create_task(alone(cluster, PROMPTS[1], 40))
        tokens = sum([len(part.tokens) async for part in parts]) + len(await later) + 1
        assert cluster.engines["t"].stats.forwards < 0.75 * tokens  # without waiting they would take turns


async def test_no_engine_outlives_its_cluster() -> None:
    slow = {"slow": EmulatedBackend("slow", 1, EmulateSpec(150.0, 1.0), 256)}
    async with running(slow) as cluster:
        async for _ in cluster.stream(PROMPTS[0], GREEDY, 50, (256,), Speculation("off")):
            break
    assert "slow" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in float64, so that equality is exact."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).double().save_pretrained(folder)
    tokens = {"model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(64)}, "unk_token": "t0"}}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **tokens}))
    return folder


def real(folder: Path, num_blocks: int = 64) -> dict[str, Backend]:
    def load(layers: int) -> TransformersBackend:
        dtype = torch.float64
        return TransformersBackend(folder, dtype=dtype, device="cpu", num_blocks=lambda: num_blocks, layers=layers)

    target = load(4)
    return {"n": NgramBackend(target.vocabulary, target.end_ids, 256), "a": load(3), "t": target}


def independent(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy loop, without cache."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == 1:
                break
    return tokens[len(prompt) :]


REAL_CHAINS = [("n", "t"), ("a", "t"), ("n", "a", "t"), ("a+n", "t")]


PENALTIES = Sampling(
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((5, 1.5),),
    end_ids=(1,),
    min_tokens=9,
)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(0.8, seed=7),
        Sampling(1.0, 20, 0.9, 11),
        PENALTIES,
        replace(PENALTIES, temperature=0.9, min_p=0.02),
    ],
)
async def test_real_weights_give_the_targets_text_over_every_chain(tiny: Path, sampling: Sampling) -> None:
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4], [9, 9, 9, 9], [2, 7, 8, 2, 7, 8, 2, 7, 8, 5, 6]]
    async with running(real(tiny)) as cluster:
        off = [await cluster.generate(p, sampling, 40, (1,), Speculation("off")) for p in prompts]
        if sampling is GREEDY:
            assert [o.tokens for o in off] == [independent(tiny, p, 40) for p in prompts]
        accepted = drafted = 0
        for chain in REAL_CHAINS:
            many = [cluster.generate(p, sampling, 40, (1,), fixed(chain)) for p in prompts]
            outputs = await asyncio.gather(*many)
            assert [o.tokens for o in outputs] == [o.tokens for o in off]
            accepted += sum(o.metrics.accepted_draft_tokens for o in outputs if o.metrics)
            drafted += sum(o.metrics.draft_tokens for o in outputs if o.metrics)
        assert 0 < accepted < drafted


@pytest.mark.parametrize("chain", REAL_CHAINS)
async def test_a_seeded_text_is_the_same_alone_and_among_others(tiny: Path, chain: tuple[str, ...]) -> None:
    seeded, prompt = Sampling(0.9, seed=123), [3, 4, 5, 3, 4, 5, 3, 4]
    others = [GREEDY, *(Sampling(temperature, seed=seed) for temperature, seed in ((0.5, 1), (1.0, 2), (1.3, 2)))]
    others += [Sampling(1.0, seed=secrets.randbits(63)) for _ in range(3)]
    async with running(real(tiny)) as cluster:
        alone = await cluster.generate(prompt, seeded, 40, (), Speculation("off"))
        batch = [cluster.generate(prompt, sampling, 60, (), fixed(chain)) for sampling in (seeded, *others)]
        outputs = await asyncio.gather(*batch)
        assert outputs[0].tokens[:40] == alone.tokens
        assert len({tuple(output.tokens) for output in outputs}) == len(outputs)
        assert cluster.engines["t"].stats.most_sequences_in_forward > 1


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, top_k=5, seed=3, repetition_penalty=1.3)])
async def test_case_9_logprobs_are_the_targets_over_its_raw_logits(tiny: Path, sampling: Sampling) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float64).eval()
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    async with running(real(tiny)) as cluster:
        for chain in REAL_CHAINS:
            output = await cluster.generate(prompt, sampling, 30, (1,), fixed(chain), logprobs=3)
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + output.tokens])).logits[0, len(prompt) - 1 : -1]
            wanted = torch.log_softmax(logits, dim=-1)
            assert len(output.logprobs) == len(output.tokens)
            for row, token, given in zip(wanted, output.tokens, output.logprobs, strict=True):
                assert given.logprob == pytest.approx(float(row[token]), abs=1e-6)
                assert [t for t, _ in given.top] == row.topk(3).indices.tolist()
                assert [value for _, value in given.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-6)


@pytest.mark.parametrize("chain", [("a", "t"), ("n", "a", "t")])
async def test_a_known_prefix_is_not_computed_again_and_changes_nothing(tiny: Path, chain: tuple[str, ...]) -> None:
    prompt = [2 + i * i % 61 for i in range(50)]
    async with running(real(tiny)) as cluster:
        stats = cluster.engines["t"].stats
        first = await cluster.generate(prompt, GREEDY, 30, (1,), fixed(chain))
        await nothing_held(cluster)
        assert stats.cached_tokens == 0
        again = await cluster.generate(prompt, GREEDY, 30, (1,), fixed(chain))
        assert stats.cached_tokens == 48
        assert again.tokens == first.tokens == independent(tiny, prompt, 30)
        assert chain[0] == "n" or again.metrics == first.metrics  # case 15; n-grams learn from what they have seen
        strict_prefix = await cluster.generate(prompt[:48], GREEDY, 30, (1,), fixed(chain))
        assert stats.cached_tokens == 48 + 32  # its last token is computed, to sample from
        assert strict_prefix.tokens == independent(tiny, prompt[:48], 30)
        await nothing_held(cluster)
        next_turn = [*prompt, *first.tokens, 3, 4]
        answer = await cluster.generate(next_turn, GREEDY, 30, (1,), fixed(chain))
        assert stats.cached_tokens == 48 + 32 + (len(prompt) + len(first.tokens) - 1) // 16 * 16
        assert answer.tokens == independent(tiny, next_turn, 30)


async def test_prompts_that_push_one_another_out_of_little_room_keep_their_texts(tiny: Path) -> None:
    prompts = [[2 + (i * i + shift) % 61 for i in range(20 + shift)] for shift in (0, 5, 5, 11, 0, 5)]
    async with running(real(tiny, num_blocks=9)) as cluster:
        for _ in range(2):
            many = [cluster.generate(p, GREEDY, 30, (1,), fixed(("a", "t"))) for p in prompts]
            assert [o.tokens for o in await asyncio.gather(*many)] == [independent(tiny, p, 30) for p in prompts]
        assert cluster.engines["t"].stats.cached_tokens > 0
