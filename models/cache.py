"""Where converted weights and compiled kernels are kept."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$SPECRELAY_CACHE, or ~/.cache/specrelay."""
    named = os.environ.get("SPECRELAY_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "specrelay"
