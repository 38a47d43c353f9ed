"""The lines of a batch: all are read and checked before anything starts; results appear whole or not at all."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specrelay.exits import Refused

PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Row:
    """One request: `index` counts from 0 in the file, `path` is the route that answers, `body` its JSON."""

    index: int
    id: str | int | None
    path: str
    body: dict[str, Any]


def read_rows(source: Path, model: str) -> list[Row]:
    """All requests of a JSONL file, for `model` where a line names none; Refused naming the first bad line."""
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"cannot read --input {source}: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise Refused(f"--input {source} holds no requests")
    rows = [_row(index, f"{source}:{number}", line, model) for index, (number, line) in enumerate(lines)]
    _refuse_repeated_ids(source, rows)
    return rows


def _row(index: int, place: str, line: str, model: str) -> Row:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise Refused(f"{place} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Refused(f'{place} is not an object: write {{"prompt": …}} or {{"messages": …}}')
    given = [name for name in PATHS if name in fields]
    if len(given) != 1:
        raise Refused(f"{place} needs one of prompt and messages, it has {' and '.join(given) or 'neither'}")
    if fields.get("stream"):
        raise Refused(f"{place}: stream is not possible in a batch: leave it out")
    row_id = fields.pop("id", None)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int | None):
        raise Refused(f"{place}: id must be a string or an integer")
    return Row(index, row_id, PATHS[given[0]], {"model": model} | fields)


def _refuse_repeated_ids(source: Path, rows: list[Row]) -> None:
    seen: dict[str | int, int] = {}
    for row in rows:
        if row.id is not None and seen.setdefault(row.id, row.index) != row.index:
            raise Refused(
                f"--input {source}: id {row.id!r} stands at rows {seen[row.id]} and {row.index}: make ids unique"
            )


def check_output(output: Path) -> None:
    """Refuse an output that cannot be written, or that would vanish with a Ray job's working folder."""
    if in_ray_job() and not output.is_absolute():
        raise Refused(
            f"--output {output} is relative and would vanish with the job's working folder: give an absolute path on a "
            f"volume that outlives the job, as in --output /data/{output.name}"
        )
    if output.is_dir():
        raise Refused(f"--output {output} is a folder: name a file")
    if not output.parent.is_dir():
        raise Refused(f"--output {output}: the folder {output.parent} does not exist: create it")
    if not os.access(output.parent, os.W_OK):
        raise Refused(f"--output {output}: the folder {output.parent} is not writable")


def in_ray_job() -> bool:
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


@contextmanager
def written_whole(output: Path) -> Iterator[TextIO]:
    """A file that takes the place of `output` when the block ends well, and vanishes when it does not."""
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
