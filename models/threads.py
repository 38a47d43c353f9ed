"""Processors for the threads that compute.

OpenMP keeps workers for every thread that computes in parallel. A worker that slept is woken on the processor of the
thread that wakes it if all others are busy at that moment; then both share that processor until the system notices that
another one idles. Threads that are bound each to a processor of its own cannot meet so.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from models.kernels.elementwise import silu_gate

_TASKS = Path("/proc/self/task")


def bind_workers() -> bool:
    """Bind the calling thread, which must not have computed yet, and its workers to a processor each; whether it did.

    Only where the threads are as many as the processors that this process may use: with fewer, or with other processes
    doing the same on a part of the machine, the system knows better than we which are free.
    """
    if not hasattr(os, "sched_setaffinity") or not _TASKS.is_dir():
        return False
    first, *others = sorted(os.sched_getaffinity(0))
    if not others or torch.get_num_threads() != len(others) + 1:
        return False
    # numba's have no workers of their own where it loads the same OpenMP as torch.
    pools = [_started(compute) for compute in (_compute_with_torch, _compute_with_numba)]
    if any(len(pool) not in (0, len(others)) for pool in pools):
        return False
    for pool in pools:
        for thread, processor in zip(pool, others, strict=False):
            os.sched_setaffinity(thread, {processor})
    os.sched_setaffinity(0, {first})
    return True


def _started(compute: Callable[[], object]) -> list[int]:
    """The threads that were started by it."""
    before = _threads()
    compute()
    return sorted(_threads() - before)


def _threads() -> set[int]:
    return {int(task.name) for task in _TASKS.iterdir()}


def _compute_with_torch() -> None:
    torch.ones(1 << 20).sum()


def _compute_with_numba() -> None:
    silu_gate(np.zeros((64, 32), np.float32), np.zeros((64, 16), np.float32))
