"""Checks before anything starts. Each raises PreflightError: one line that names the cause and the fix."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.config import SecurityConfig
from cluster.config_errors import PreflightError
from cluster.placement import Placement


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What one node offers to Ray in all."""

    cpus: float
    gpus: float
    accelerator_types: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's token ids: `fingerprint` equal means equal meaning; `tokens[i]` is the text of id i."""

    model: str
    fingerprint: str
    tokens: Sequence[str]


def check_port(host: str, port: int) -> None:
    """Nobody listens at host:port. A socket in TIME_WAIT does not count."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except PermissionError as error:
        raise PreflightError(f"no permission to listen on port {port}: choose one above 1023 with --port") from error
    except socket.gaierror as error:
        raise PreflightError(f"http.host {host} is not an address of this machine: use 127.0.0.1 or 0.0.0.0") from error
    except OSError as error:
        cause = error.strerror or str(error)
        raise PreflightError(f"cannot listen at {host}:{port} ({cause}): stop what uses it or pass --port") from error


def machine_capacity() -> NodeCapacity:
    """This machine, for a Ray of its own: CPUs this process may use, NVIDIA GPUs that are visible."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_visible = len(devices) if visible is None else len([name for name in visible.split(",") if name.strip()])
    return NodeCapacity(cpus=available_cpus(), gpus=min(len(devices), num_visible))


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_resources(placements: Sequence[Placement], nodes: Sequence[NodeCapacity]) -> None:
    """The sums fit, and each replica fits on some node. It does not solve the packing; Ray does."""
    for name in ("cpus", "gpus"):
        needed = sum(getattr(placement, name) * placement.num_replicas for placement in placements)
        offered = sum(getattr(node, name) for node in nodes)
        if needed > offered:
            fix = "lower resources or replicas, or add nodes"
            raise PreflightError(f"the models need {needed:g} {name}, the cluster has {offered:g}: {fix}")
    for placement in placements:
        if not any(_fits(placement, node) for node in nodes):
            raise PreflightError(
                f"no node can hold a replica of {placement.model} ({_needs(placement)}): {_best(nodes)}"
            )


def check_secrets(security: SecurityConfig) -> None:
    """The environment variables that the config names are set."""
    for key in ("api_keys_env", "stream_token_env"):
        variable = getattr(security, key)
        if variable is not None and not os.environ.get(variable, "").strip():
            fix = "set it, or leave the key out"
            raise PreflightError(f"security.{key}: the environment variable {variable} is not set: {fix}")


def check_vocabularies(vocabularies: Sequence[Vocabulary]) -> None:
    """Each model's ids mean what the target's (the last one's) mean; one may have more of them than the other."""
    target = vocabularies[-1]
    for other in vocabularies[:-1]:
        if other.fingerprint == target.fingerprint:
            continue
        differing = _first_difference(other.tokens, target.tokens)
        if differing is not None:
            mine, theirs = other.tokens[differing], target.tokens[differing]
            raise PreflightError(
                f"the vocabularies of {other.model} and {target.model} disagree at token {differing} "
                f"({mine!r}, {theirs!r}): use models of one family"
            )


def _first_difference(some: Sequence[str], others: Sequence[str]) -> int | None:
    pairs = zip(some, others, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), None)


def _fits(placement: Placement, node: NodeCapacity) -> bool:
    return (
        placement.cpus <= node.cpus
        and placement.gpus <= node.gpus
        and (placement.accelerator_type is None or placement.accelerator_type in node.accelerator_types)
        and all(node.labels.get(key) == value for key, value in placement.labels.items())
    )


def _needs(placement: Placement) -> str:
    parts = [f"{placement.cpus:g} cpus", f"{placement.gpus:g} gpus"]
    if placement.accelerator_type is not None:
        parts.append(f"accelerator type {placement.accelerator_type}")
    return ", ".join(parts + [f"label {key}={value}" for key, value in placement.labels.items()])


def _best(nodes: Sequence[NodeCapacity]) -> str:
    types = sorted({name for node in nodes for name in node.accelerator_types})
    most_cpus = max((node.cpus for node in nodes), default=0)
    most_gpus = max((node.gpus for node in nodes), default=0)
    return f"the largest have {most_cpus:g} cpus, {most_gpus:g} gpus, accelerator types {', '.join(types) or 'none'}"
