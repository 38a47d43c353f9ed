"""Who gives way on a processor that several want: on one machine a forward and all of Ray share them.

A forward runs on threads that wait for one another, so it takes as long as the slowest. Ray's processes wake some
hundred times a second for a few microseconds each, and in the usual policy a thread that wakes interrupts the one that
runs. Under Linux's SCHED_BATCH it waits until a processor is free or its turn has come. Elsewhere nothing changes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def giving_way() -> Iterator[None]:
    """Processes and threads that the calling thread starts during the block interrupt nobody when they wake."""
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    if before == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, parameters)


def come_first() -> None:
    """The calling thread, and those it starts from now on, give way no more: rounds wait for them."""
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
