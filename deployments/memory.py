"""The router's memory on disk: one small file per set of models, read at its start and written while it learns."""

import asyncio
import hashlib
import json
import logging
import os
from pathlib import Path

from cluster.config import AppConfig
from models.cache import default_cache_dir
from router.learned import NOTHING, Learned, UnreadableError, decode, encode
from router.service import RouterCore

log = logging.getLogger(__name__)

SAVE_S = 10.0
_SPEED_ONLY = {"resources", "replicas", "device", "threads", "compile", "emulate"}
"""Keys of a model that change nothing of what it says, or can change while it runs."""


def memory_path(config: AppConfig) -> Path:
    """Where the app's router keeps what it learned, on the node that it runs on; the same for the same models."""
    models = [model.model_dump(mode="json", exclude=_SPEED_ONLY) for model in config.models]
    digest = hashlib.sha256(json.dumps(models, sort_keys=True).encode()).hexdigest()[:16]
    return default_cache_dir() / "router" / f"{config.name}-{digest}.json"


class Memory:
    """A file that cannot be read or written costs what was learned, never a start or a request."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Learned:
        try:
            return decode(self._path.read_bytes())
        except FileNotFoundError:
            return NOTHING
        except (OSError, UnreadableError) as error:
            log.warning("starting without %s: %s", self._path, error)
            return NOTHING

    def write(self, data: bytes) -> None:
        """Whole or not at all."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(f".{os.getpid()}")
        fresh.write_bytes(data)
        fresh.replace(self._path)

    async def keep(self, core: RouterCore) -> None:
        """Write what `core` has learned, for as long as it runs, wherever there were rounds since."""
        rounds = 0
        while True:
            await asyncio.sleep(SAVE_S)
            if core.stats.rounds == rounds:
                continue
            rounds = core.stats.rounds
            try:
                await asyncio.to_thread(self.write, encode(core.planning.learned()))
            except OSError as error:
                log.warning("cannot write %s: %s", self._path, error)
