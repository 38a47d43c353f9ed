"""Kernels for CPUs, compiled by numba at their first call.

Compiled code is kept under $SPECRELAY_CACHE (or NUMBA_CACHE_DIR, if set), in a folder named after the sources of all
kernels: numba itself only notices changes of the file that a kernel is written in, not of those it calls.
"""

import hashlib
import os
from pathlib import Path

import numba

from models.cache import default_cache_dir


def _sources() -> str:
    """Short hex name of this folder's sources."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


if "NUMBA_CACHE_DIR" not in os.environ:
    numba.config.CACHE_DIR = str(default_cache_dir() / "kernels" / _sources())
