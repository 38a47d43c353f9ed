"""Rules between keys, and the one list of what this release does not support. Raises ConfigError, returns nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.config_errors import ConfigError, nearest
from router.plan import members_of

if TYPE_CHECKING:
    from cluster.config import AppConfig, Model

RESERVED_NAMES = frozenset({"Router", "KVCoordinator", "Ingress"})
"""Deployments of every app."""


def refuse_unsupported(config: "AppConfig") -> None:
    """Everything that the reference of the config names and this release would have to ignore."""
    for index, model in enumerate(config.models):
        path = f"models[{index}]"
        if getattr(model, "compile", "auto") == "on":
            raise _unsupported(f"{path}.compile", "use auto or off")
        if not isinstance(model.replicas, int):
            raise _unsupported(f"{path}.replicas", "as a range; give a number")
    if config.security.tls is not None:
        raise _unsupported("security.tls", "leave it out")


def check_names(config: "AppConfig") -> None:
    """First of all checks: the others find models by name."""
    seen: dict[str, int] = {}
    for index, model in enumerate(config.models):
        path = f"models[{index}]"
        if model.name in seen:
            raise ConfigError(f"{path}.name", f"{model.name} is already the name of models[{seen[model.name]}]")
        if model.name in RESERVED_NAMES:
            raise ConfigError(f"{path}.name", f"{model.name} is reserved; choose another name")
        seen[model.name] = index


def check_models(config: "AppConfig") -> None:
    for index, model in enumerate(config.models):
        _check_hub_keys(model, f"models[{index}]")
    _check_levels(config)
    _check_target(config)
    _check_mixture(config)


def check_chain(config: "AppConfig") -> None:
    """`fixed` needs a chain; with `adaptive` a chain would be ignored, so it is refused."""
    router = config.router
    if router.policy == "adaptive":
        for key in ("chain", "windows"):
            if getattr(router, key) is not None:
                raise ConfigError(f"router.{key}", "only with router.policy: fixed; adaptive plans it")
        return
    if config.fixed_chain is None:
        raise ConfigError("router.chain", "required with router.policy: fixed")
    _check_chain_names(config, config.fixed_chain)
    if router.windows is not None and len(router.windows) != len(config.fixed_chain) - 1:
        needed = len(config.fixed_chain) - 1
        raise ConfigError("router.windows", f"a chain of {needed + 1} needs {needed}, got {len(router.windows)}")


def _check_chain_names(config: "AppConfig", chain: tuple[str, ...]) -> None:
    fault = chain_fault([members_of(element) for element in chain], config.levels, config.target.name)
    if fault is not None:
        place, reason = fault
        raise ConfigError("router.chain" if place is None else f"router.chain[{place}]", reason)


def chain_fault(
    elements: Sequence[Sequence[str]], levels: Mapping[str, int], target: str, group_at: int = 0
) -> tuple[int | None, str] | None:
    """Why these cannot be a chain, each given by its models' names, and what to do; None if they can.

    The first of the pair says which of them is at fault, None for the chain as a whole. Only the one at `group_at` may
    have several models.
    """
    for place, names in enumerate(elements):
        for name in names:
            if name not in levels:
                return place, f"no model {name!r}; nearest valid name: {nearest(name, levels)}"
            if place and (fault := _order_fault(elements[place - 1][0], name, levels)) is not None:
                return place, fault
        if (fault := _group_fault(names, levels, may_be=place == group_at)) is not None:
            return place, fault
    if not elements or list(elements[-1]) != [target]:
        return None, f"must end with the target, {target}"
    return None


def _order_fault(before: str, name: str, levels: Mapping[str, int]) -> str | None:
    """Why `name` cannot follow `before` in a chain, and what to do; None if it can."""
    if levels[name] > levels[before]:
        return None
    if levels[name] == levels[before]:
        return f"{before} and {name} are of one level: name one of them, or both as a list first in the chain"
    return f"{name} must come before {before}: cheapest first"


def _group_fault(names: Sequence[str], levels: Mapping[str, int], *, may_be: bool) -> str | None:
    """Why these models cannot stand in one place of a chain, and what to do; None if they can."""
    if len(names) == 1:
        return None
    if not may_be:
        return "only drafters cooperate, which stand first; give one name here"
    if len(set(names)) < len(names):
        return "names a drafter twice; name each once"
    if len({levels[name] for name in names}) > 1:
        return f"{', '.join(names)} are of different levels; give cooperating drafters the same `level`"
    return None


def _check_levels(config: "AppConfig") -> None:
    levels = list(config.levels.items())
    for index, (name, level) in enumerate(levels[1:], 1):
        before, level_before = levels[index - 1]
        if level < level_before:
            reason = f"{name} has level {level} after {before} with level {level_before}; list the cheapest first"
            raise ConfigError(f"models[{index}].level", reason)
    *drafters, (target, target_level) = levels
    for index, (name, level) in enumerate(drafters):
        if level == target_level:
            reason = f"{name} has level {level}, as the target {target}: give it a lower one, or remove it"
            raise ConfigError(f"models[{index}].level", reason)


def _check_target(config: "AppConfig") -> None:
    path = f"models[{len(config.models) - 1}]"
    target = config.target
    if target.kind == "ngram":
        raise ConfigError(f"{path}.kind", "the target, last in the list, cannot be an ngram")
    if getattr(target, "prompt_tokens", None) is not None:
        raise ConfigError(f"{path}.prompt_tokens", "only for drafters: the target reads the whole prompt")
    if target.kind == "emulated" and not target.emulate.always_agrees:
        raise ConfigError(f"{path}.emulate.agreement", "the target's agreement must be 1.0")


def _check_mixture(config: "AppConfig") -> None:
    """Emulated token ids are bytes: they mean nothing to a real model."""
    for index, model in enumerate(config.models):
        if model.kind not in ("ngram", config.target.kind):
            reason = f"{model.kind} {model.name} cannot draft for {config.target.kind} {config.target.name}"
            raise ConfigError(f"models[{index}].kind", reason)


def _check_hub_keys(model: "Model", path: str) -> None:
    source = getattr(model, "source", "")
    if not source.startswith(("pypi:", ".", "/", "~")):
        return
    if getattr(model, "revision", None) is not None:
        raise ConfigError(f"{path}.revision", f"only for a hub id, not for {source}")
    if getattr(model, "trust_remote_code", False):
        raise ConfigError(f"{path}.trust_remote_code", f"only for a hub id, not for {source}")


def _unsupported(path: str, fix: str) -> ConfigError:
    return ConfigError(path, f"not supported yet: {fix}")
