"""Packed rows over paged KV against transformers' own forward: tiny random models in float64, so equality is exact."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deployments.torch_backends import check_room
from kvstate.protocol import Sampling
from models.backend import Slice, TopSink
from models.processing import Row
from models.sampling import sample
from models.transformers_backend import TransformersBackend, UnsupportedModel, plan_blocks

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=7),
}
SEEDED = Sampling(1.0, seed=11)
BLOCKS = {0: [5, 1, 9, 3, 12, 7], 1: [2, 4, 6, 8, 10, 11], 2: [20, 21, 22, 23, 24, 25]}


def save(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, layers: int | None = None, dtype: torch.dtype = torch.float64) -> TransformersBackend:
    return TransformersBackend(folder, dtype=dtype, device="cpu", num_blocks=lambda: 32, block_tokens=16, layers=layers)


def reference(folder: Path, layers: int | None = None) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.from_pretrained(folder)
    if layers is not None:
        config.num_hidden_layers = layers
    return transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
        folder, config=config, dtype=torch.float64, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def continuation(model: transformers.PreTrainedModel, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    """Without any cache: the whole prefix through transformers' forward for each token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens += sample(logits, [Row(len(tokens), sampling, tokens, len(prompt))])
    return tokens[len(prompt) :]


def rows(tokens: list[int], start: int, sample_from: int, name: int, sampling: Sampling) -> Slice:
    return Slice(tokens, start, len(tokens), sample_from, len(tokens), BLOCKS[name], sampling)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What a model computes in: float64 runs its own forward, float32 the kernels where they fit."""
    made: torch.dtype = request.param
    return made


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED])
def test_packed_sequences_equal_transformers(folder: Path, dtype: torch.dtype, sampling: Sampling) -> None:
    """Three prompts of unequal length in every forward; blocks of two are scattered."""
    prompts = [[1, 5, 9], [1, *range(40, 57)], [1]]
    expected = [continuation(reference(folder), prompt, 12, sampling) for prompt in prompts]
    backend = load(folder, dtype=dtype)
    texts, starts = [list(prompt) for prompt in prompts], [0, 0, 0]
    for _ in range(12):
        slices = [rows(text, starts[i], len(text) - 1, i, sampling) for i, text in enumerate(texts)]
        for i, [token] in enumerate(backend.forward(slices)):
            assert token is not None
            starts[i] = len(texts[i])
            texts[i].append(token)
    assert [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)] == expected
    assert len({token for text in expected for token in text}) > 5


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_lean_forward_runs_where_it_can(tmp_path: Path, family: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        backend = load(save(tmp_path / str(dtype), FAMILIES[family]()), dtype=dtype)
        assert backend.is_lean == (family not in {"gemma", "phi"} and dtype != torch.float64)


def test_greedy_equals_generate(folder: Path) -> None:
    prompt = [1, 7, 33, 2, 90]
    made = reference(folder).generate(  # type: ignore[operator]
        torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False, eos_token_id=None
    )
    assert continuation(reference(folder), prompt, 10, Sampling()) == made[0, len(prompt) :].tolist()


def test_rollback_is_overwriting(folder: Path, dtype: torch.dtype) -> None:
    """A check of wrong tokens leaves KV behind; the right tokens written over it give the right samples."""
    prompt = [1, *range(60, 70)]
    expected = continuation(reference(folder), prompt, 6, Sampling())
    backend = load(folder, dtype=dtype)
    backend.forward([rows(prompt, 0, len(prompt), 0, Sampling())])
    wrong = [*prompt, expected[0], *[(token + 1) % 128 for token in expected[1:]], 4, 4, 4]
    [verdict] = backend.forward([rows(wrong, len(prompt), len(prompt), 0, Sampling())])
    assert verdict[0] == expected[1]
    right = prompt + expected[:5]
    [again] = backend.forward([rows(right, len(prompt) + 1, len(prompt) + 1, 0, Sampling())])
    assert again == expected[2:6]


def test_tops_are_the_likeliest_tokens_of_sampled_rows_and_change_no_sample(folder: Path, dtype: torch.dtype) -> None:
    text, other = [1, *range(30, 40)], [1, 99, 98, 97]
    with torch.inference_mode():
        logits = reference(folder)(input_ids=torch.tensor([text]), use_cache=False).logits[0, -3:]
    likely = torch.topk(torch.softmax(logits, dim=-1), 4)
    expected = [dict(zip(*row, strict=True)) for row in zip(*(t.tolist() for t in likely[::-1]), strict=True)]
    asked, beside = rows(text, 0, len(text) - 3, 0, SEEDED), rows(other, 0, 1, 1, SEEDED)
    sink = TopSink(4)
    samples = load(folder, dtype=dtype).forward([beside, replace(asked, tops=sink)])
    assert samples == load(folder, dtype=dtype).forward([beside, asked])
    for top, wanted in zip(sink.rows, expected, strict=True):
        assert dict(top) == pytest.approx(wanted, rel=1e-3)


def test_chunked_prefill_beside_a_check_equals_one_prefill(folder: Path, dtype: torch.dtype) -> None:
    long, other = [1, *range(30, 60)], [1, 99, 98, 97]
    expected = continuation(reference(folder), long, 1, SEEDED)
    own = continuation(reference(folder), other, 3, SEEDED)
    backend = load(folder, dtype=dtype)
    backend.forward([rows(other, 0, len(other), 1, SEEDED)])
    first = Slice(long, 0, 13, 13, len(long), BLOCKS[0], SEEDED)
    check = rows(other + own[:2], 3, 3, 1, SEEDED)
    assert backend.forward([first, check]) == [[], own]
    assert backend.forward([rows(long, 13, len(long) - 1, 0, SEEDED)]) == [expected]


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED])
def test_a_text_read_from_its_middle_is_a_text_that_begins_there(
    folder: Path, dtype: torch.dtype, sampling: Sampling
) -> None:
    """But for the noise and the penalties, which count from its real beginning."""
    text, first = [1, *range(30, 60)], 13
    with torch.inference_mode():
        logits = reference(folder)(input_ids=torch.tensor([text[first:]]), use_cache=False).logits[0, -2:]
    ends = (len(text) - 1, len(text))
    expected = sample(logits, [Row(end, sampling, text[:end], len(text)) for end in ends])
    backend = load(folder, dtype=dtype)
    parts = ((first, 20, 20), (20, len(text), len(text) - 2))
    slices = [Slice(text, *part, len(text), BLOCKS[0], sampling, None, 0.0, first) for part in parts]
    assert [backend.forward([s]) for s in slices] == [[[]], [expected]]


@pytest.mark.parametrize("layers", [1, 2])
def test_early_exit_equals_the_truncated_model(tmp_path: Path, layers: int) -> None:
    saved = save(tmp_path, FAMILIES["llama"]())
    prompt = [1, 5, 9, 77]
    expected = continuation(reference(saved, layers), prompt, 8, Sampling())
    backend, text, start = load(saved, layers), list(prompt), 0
    for _ in range(8):
        [[token]] = backend.forward([rows(text, start, len(text) - 1, 2, Sampling())])
        assert token is not None
        start = len(text)
        text.append(token)
    assert text[len(prompt) :] == expected
    assert expected != continuation(reference(saved), prompt, 8, Sampling())


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    backend = load(save(tmp_path, FAMILIES["llama"]()))
    assert (backend.context_len, backend.end_ids) == (256, frozenset({2}))
    assert (backend.num_blocks, backend.block_tokens) == (32, 16)
    assert backend.forward([]) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Gemma2Config(**SIZES), "softcap"),
        (transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=128), "attention be replaced|atten"),
        (
            transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            ),
            "longest sequence",
        ),
        (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=128), "."),
    ],
    ids=["softcap", "alibi", "dynamic rope", "recurrent"],
)
def test_refuses_what_it_cannot_serve_exactly(
    tmp_path: Path, config: transformers.PreTrainedConfig, reason: str
) -> None:
    save(tmp_path, config)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)


def test_case_18_an_id_beyond_the_vocabulary_is_no_sample_and_no_crash(folder: Path) -> None:
    """A drafter may have a larger vocabulary: its id is rejected, the tokens before it are judged as ever."""
    prompt = [1, 7, 33]
    expected = continuation(reference(folder), prompt, 1, Sampling())
    [samples] = load(folder).forward([rows([*prompt, *expected, 5000], 0, 2, 0, Sampling())])
    assert samples[0] == expected[0]
    assert all(token is not None and token < 128 for token in samples)


def test_refuses_weights_that_lack_a_tensor(tmp_path: Path) -> None:
    path = save(tmp_path, FAMILIES["llama"]()) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lack model\.layers\.1\.mlp\.down_proj\.weight"):
        load(tmp_path)


def test_refuses_more_layers_than_there_are(tmp_path: Path) -> None:
    save(tmp_path, FAMILIES["llama"]())
    with pytest.raises(UnsupportedModel, match="4"):
        load(tmp_path, layers=4)


def test_weights_that_do_not_fit_are_refused_with_what_they_need_and_what_there_is(tmp_path: Path) -> None:
    save(tmp_path, transformers.LlamaConfig(**{**SIZES, "vocab_size": 2**15}))
    weights = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path).parameters())
    check_room("m", tmp_path, torch.bfloat16, 2 * weights)
    needed = f"{4 * weights / 2**30:.2f} GiB"
    with pytest.raises(UnsupportedModel, match=rf"^m: its weights need {needed} of memory and {needed} are free: give"):
        check_room("m", tmp_path, torch.float32, 4 * weights - 1)


def test_plan_blocks_prefers_bytes_to_a_fraction() -> None:
    config = transformers.LlamaConfig(**SIZES)
    sizes: dict[str, Any] = {
        "num_layers": 3,
        "dtype_bytes": 4,
        "block_tokens": 16,
        "free_bytes": 10 * 12288,
        "memory_fraction": 0.5,
    }
    assert plan_blocks("m", config, kv_bytes=7 * 12288 + 1, **sizes) == 7  # 2 × 3 layers × 2 heads × 16 × 4 bytes × 16
    assert plan_blocks("m", config, kv_bytes=None, **sizes) == 5
    assert plan_blocks("m", config, kv_bytes=None, **{**sizes, "free_bytes": 2**40}) == 64 * 16
    with pytest.raises(UnsupportedModel, match=r"m: kv\.bytes 100 hold no block of 16 tokens, which takes 12288 bytes"):
        plan_blocks("m", config, kv_bytes=100, **sizes)
