"""What must be true before anything starts: the machine is large enough, weights are there, vocabularies agree.

Everything here raises an error that ends the command with exit code 2. Nothing here starts Ray.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.config import AppConfig, TransformersModel
from cluster.placement import place
from cluster.preflight import (
    Vocabulary,
    check_port,
    check_resources,
    check_secrets,
    check_vocabularies,
    machine_capacity,
)
from cluster.ray_runtime import joins_cluster
from models.tokenizer import fingerprint, read_vocabulary
from models.weights import prepare

Tell = Callable[[str], None]


def prepare_app(config: AppConfig, tell: Tell) -> None:
    """Checks from the quickest to the slowest; fetches and converts each source once.

    On a cluster that runs already, its size is checked after joining it.
    """
    check_secrets(config.security)
    if not joins_cluster():
        check_port(config.http.host, config.http.port)
        check_resources(place(config), [machine_capacity()])
    check_vocabularies_agree(prepare_weights(config, tell))


def prepare_weights(config: AppConfig, tell: Tell) -> dict[str, Path]:
    """Model name → folder of its weights, for the models that have some."""
    folders = {}
    for model in config.models:
        if isinstance(model, TransformersModel):
            folders[model.name] = prepare(model.source, model.revision, model.trust_remote_code, progress=tell)
    return folders


def check_vocabularies_agree(folders: Mapping[str, Path]) -> None:
    """Models that share a folder share a vocabulary: nothing is read for them."""
    if len(set(folders.values())) < 2:
        return
    vocabularies = [(name, read_vocabulary(folder)) for name, folder in folders.items()]
    check_vocabularies([vocabulary_of(name, tokens) for name, tokens in vocabularies if tokens is not None])


def vocabulary_of(model: str, ids: Mapping[str, int]) -> Vocabulary:
    """`ids` turned round: the token of each id, empty where an id has none."""
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, index in ids.items():
        tokens[index] = token
    return Vocabulary(model, fingerprint(ids), tokens)
