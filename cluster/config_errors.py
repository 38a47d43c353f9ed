"""What is refused before anything starts, as one line that names the place, the cause and the fix.

RefusedError ── ConfigError      the config file is wrong          (cluster/config.py)
             └─ PreflightError   this machine cannot run it now    (cluster/preflight.py, cluster/ray_runtime.py)
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

Location = Sequence[int | str]


class RefusedError(Exception):
    """Base: nothing was started, the command ends with exit code 2."""


class ConfigError(RefusedError):
    """`path` as written in the file (`models[1].emulate.agreement`), empty for the file as a whole."""

    def __init__(self, path: str, reason: str, file: str = "") -> None:
        super().__init__(path, reason, file)
        self.path = path
        self.reason = reason
        self.file = file

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.path, self.reason) if part)


class PreflightError(RefusedError):
    """The message names the cause and the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


def join_path(location: Location) -> str:
    """`("models", 1, "name")` → `models[1].name`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def nearest(name: str, valid: Iterable[str]) -> str:
    """The valid name most like the given one."""
    names = sorted(valid)
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]


def translate(error: ValidationError, data: object) -> ConfigError:
    """The most telling error: an unknown key (a missing one is often its right spelling), then the deepest one."""
    found = [(details, _location_in(data, details)) for details in error.errors(include_url=False)]
    details, location = min(found, key=lambda pair: (pair[0]["type"] != "unknown_key", -len(pair[1])))
    return ConfigError(join_path(location), _reason(details, location))


def _location_in(data: object, details: ErrorDetails) -> list[int | str]:
    """Where in the data the error is, without what pydantic adds: the kind of a model, names of union members."""
    location: list[int | str] = []
    for part in details["loc"]:
        if isinstance(data, Mapping) and part in data:  # noqa: SIM114 - joined, the types get lost
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        location.append(part)
    if details["type"] == "unknown_key":
        location.append(details["ctx"]["key"])
    elif details["type"] == "missing":
        location.append(details["loc"][-1])
    elif details["type"].startswith("union_tag"):
        location.append("kind")
    return location


def _reason(details: ErrorDetails, location: Location) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "unknown_key":
            hint = f"; {context['hint']}" if context["hint"] else ""
            return f"unknown key; nearest valid name: {nearest(context['key'], context['valid'])}{hint}"
        case "missing" | "union_tag_not_found":
            return "required key is missing"
        case "union_tag_invalid":
            return _not_one_of(context["tag"], context["expected_tags"])
        case "literal_error":
            return _not_one_of(details["input"], context["expected"])
        case "value_error":
            return str(context["error"])
    message = (details["msg"][0].lower() + details["msg"][1:]).replace("tuple", "list")
    given = details["input"]
    shown = not isinstance(given, Mapping | list | tuple) and location[:1] != ["security"]
    return f"{message}, got {given!r}" if shown else message


def _not_one_of(given: object, expected: str) -> str:
    names = [name.strip("' ") for name in expected.replace(" or ", ", ").split(", ")]
    return f"{given!r} is not one of {', '.join(names)}; nearest: {nearest(str(given), names)}"
