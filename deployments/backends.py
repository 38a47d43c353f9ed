"""From a model's config to its backend and the app's tokenizer. Runs in the replica's process; weights are prepared."""

import json
import os
from pathlib import Path

from cluster.config import AppConfig, Emulate, EmulatedModel, NgramModel, TransformersModel
from models import weights
from models.backend import Backend
from models.emulated import EOS, EmulatedBackend, EmulateSpec
from models.ngram import NgramBackend
from models.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer, read_end_ids, read_fingerprint, read_vocabulary

EMULATED_BLOCKS = 4096
OPENMP_SPINS = "10000"
"""How often an OpenMP thread looks for work before it sleeps: longer than the gap between two products, and far shorter
than libgomp's default, with which the threads of an idle replica keep the processors from those who have work."""


def build_backend(config: AppConfig, name: str, *, on_own_thread: bool = False) -> Backend:
    """The backend of model `name`; loads weights, so call it off the event loop.

    on_own_thread  the calling thread is new and will do nothing but compute with it (models/threads.py)
    """
    model = next(m for m in config.models if m.name == name)
    match model:
        case EmulatedModel():
            rank = [m.name for m in config.models].index(name)  # alternatives of one level err differently
            return EmulatedBackend(name, rank, emulate_spec(model.emulate), EMULATED_BLOCKS, config.kv.block_tokens)
        case NgramModel():
            return _ngram(config)
        case TransformersModel():
            os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read once, when torch is imported
            from deployments import torch_backends  # here, because emulated models need not wait for torch

            return torch_backends.build(config, model, _folder(model), on_own_thread=on_own_thread)


def build_tokenizer(config: AppConfig) -> Tokenizer:
    """The target's tokenizer; bytes where the target is emulated."""
    target = config.target
    if not isinstance(target, TransformersModel):
        return ByteTokenizer()
    return HubTokenizer(_folder(target), target.trust_remote_code)


def context_len(config: AppConfig) -> int:
    """Most tokens of prompt and output together: the target's context."""
    target = config.target
    if isinstance(target, EmulatedModel):
        return target.emulate.context_len
    assert isinstance(target, TransformersModel), "config refuses an n-gram target"
    shape = json.loads((_folder(target) / "config.json").read_text())
    return int(shape.get("text_config", shape)["max_position_embeddings"])


def vocabulary_len(config: AppConfig) -> int:
    """Token ids that a prompt may hold lie below it."""
    target = config.target
    if not isinstance(target, TransformersModel):
        return EOS + 1
    return max((read_vocabulary(_folder(target)) or {"": 0}).values()) + 1


def emulate_spec(emulate: Emulate) -> EmulateSpec:
    return EmulateSpec(**emulate.model_dump())


def _ngram(config: AppConfig) -> NgramBackend:
    """It drafts for the target, so it shares the target's vocabulary and context."""
    target = config.target
    if isinstance(target, TransformersModel):
        folder = _folder(target)
        return NgramBackend(read_fingerprint(folder), read_end_ids(folder), context_len(config))
    tokens = EmulatedBackend("ngram", 0, EmulateSpec(base_ms=0.0, agreement=1.0), 1)
    return NgramBackend(tokens.vocabulary, tokens.end_ids, context_len(config))


def _folder(model: TransformersModel) -> Path:
    return weights.prepare(model.source, model.revision, model.trust_remote_code)
