"""A row has the same bits whatever rows are computed with it: alone, in blocks of a check, in chunks of a prefill.

At the sizes of a small real model, because libraries choose their kernels by size.
"""

from functools import partial
from typing import Any

import pytest
import torch
import transformers

from kvstate.protocol import Sampling
from models.backend import Slice
from models.kv_cache import KVCache, pack_rows
from models.lean_decoder import LeanDecoder, lean_decoder

BLOCK_TOKENS = 16
NUM_BLOCKS = 256
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 512}


class Decoder:
    """A lean decoder over a cache of its own; `blocks` of two sequences, one of them scattered."""

    blocks = (list(range(140)), [200, *range(140, 190)])

    def __init__(self, lean: LeanDecoder) -> None:
        self._lean = lean
        self._cache = KVCache(2, NUM_BLOCKS, BLOCK_TOKENS, 3, 64)

    @torch.inference_mode()
    def logits(self, *spans: tuple[int, list[int], int, int]) -> list[torch.Tensor]:
        """Of each (sequence, text, start, end): logits of its rows, in one forward."""
        slices = [Slice(text, a, b, a, 1, self.blocks[seq], Sampling()) for seq, text, a, b in spans]
        ids = [token for _, text, a, b in spans for token in text[a:b]]
        rows = self._lean.logits(ids, pack_rows(slices), range(len(ids)), self._cache)
        return list(rows.split([b - a for _, _, a, b in spans]))


KINDS = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest) -> partial[Decoder]:
    torch.manual_seed(5)
    dtype, quantization = KINDS[request.param]
    config = transformers.LlamaConfig(hidden_size=576, intermediate_size=1536, max_position_embeddings=2048, **SIZES)
    lean = lean_decoder(transformers.AutoModelForCausalLM.from_config(config, dtype=dtype), quantization)
    assert lean is not None
    return partial(Decoder, lean)


@pytest.mark.parametrize("start", [1, 500, 1984])
def test_blocks_of_2_to_64_rows_equal_one_row_at_a_time(make: partial[Decoder], start: int) -> None:
    text = torch.randint(0, 512, (start + 64,), generator=torch.Generator().manual_seed(start)).tolist()
    one, blocks = make(), make()
    for decoder in (one, blocks):
        decoder.logits((0, text, 0, start))
    alone = torch.cat([one.logits((0, text, i, i + 1))[0] for i in range(start, start + 64)])
    for size in (2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64):
        [rows] = blocks.logits((0, text, start, start + size))
        assert torch.equal(rows, alone[:size]), size


def test_a_prefill_in_chunks_equals_one_of_any_cut(make: partial[Decoder]) -> None:
    text = torch.randint(0, 512, (600,), generator=torch.Generator().manual_seed(9)).tolist()
    [whole] = make().logits((0, text, 0, 600))
    for cuts in ([1, 7, 600], [256, 512, 600], [33, 66, 545, 600]):
        decoder, start = make(), 0
        for end in cuts:
            [rows] = decoder.logits((0, text, start, end))
            assert torch.equal(rows, whole[start:end]), (start, end)
            start = end


def test_a_prompt_cut_anywhere_beside_a_check_gives_the_same_bits(make: partial[Decoder]) -> None:
    texts = torch.randint(0, 512, (2, 300), generator=torch.Generator().manual_seed(7)).tolist()
    whole = make()
    [wanted] = whole.logits((0, texts[0], 0, 300))
    for cuts in ([1, 70, 300], [64, 128, 200, 300], [250, 256, 300]):
        decoder, start = make(), 0
        decoder.logits((1, texts[1], 0, 290))
        for end in cuts:
            rows, _ = decoder.logits((0, texts[0], start, end), (1, texts[1], 288, 291))
            assert torch.equal(rows, wanted[start:end]), (start, end)
            start = end


def test_another_sequence_in_the_batch_changes_no_bit(make: partial[Decoder]) -> None:
    texts = torch.randint(0, 512, (2, 600), generator=torch.Generator().manual_seed(4)).tolist()
    alone, together = make(), make()
    for decoder in (alone, together):
        decoder.logits((0, texts[0], 0, 530))
        decoder.logits((1, texts[1], 0, 40))
    for size in (1, 2, 5):
        single = [alone.logits((0, texts[0], 530, 530 + size))[0], alone.logits((1, texts[1], 40, 41))[0]]
        both = together.logits((0, texts[0], 530, 530 + size), (1, texts[1], 40, 41))
        assert all(torch.equal(a, b) for a, b in zip(single, both, strict=True))


def test_what_lies_beyond_a_sequence_counts_for_nothing(make: partial[Decoder]) -> None:
    """Its own rolled back drafts, and the next sequence's keys."""
    text = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    clean, dirty = make(), make()
    dirty.logits((0, text[::-1], 0, 40))
    for decoder in (clean, dirty):
        decoder.logits((0, text, 0, 20))
    assert torch.equal(clean.logits((0, text, 20, 21))[0], dirty.logits((0, text, 20, 21))[0])
