"""Any decoder-only causal language model of transformers as a `Backend`: one forward over packed rows of many sequences.

The model's own code runs; only its attention is ours (`models/attention.py`), over a paged cache. Models whose result for
a sequence would depend on the batch, or whose state cannot be rolled back, are refused when they are loaded, with
`UnsupportedModel`: by what their configuration says, and by a probe that compares them with transformers' own attention.

Letters: R packed rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from models.attention import LEAST_ROWS, NAME, PagedRows, UnsupportedModel, paged_attention, plan_rows
from models.backend import Slice
from models.kv_cache import KvCache, LayerShape
from models.sampling import sample
from models.tokenizer import read_end_ids, read_fingerprint
from kvstate.protocol import Sampling

__all__ = ["TransformersBackend", "UnsupportedModel", "read_config", "layer_shapes", "paged_attention"]

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_BATCH_ROPE = frozenset({"dynamic", "longrope"})
_PROBE_IDS = 11
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of logits from the reference in the probe, as a share of the largest logit."""
