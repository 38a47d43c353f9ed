"""Policies of threads and processes as the kernel tells them."""

import os
import subprocess
import sys
import threading

import pytest

from cluster.priority import come_first, giving_way

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of threads are Linux's")

TELL = "import os; print(os.sched_getscheduler(0))"


def policy_of_child() -> int:
    return int(subprocess.run([sys.executable, "-c", TELL], check=True, capture_output=True, text=True).stdout)


def policies_in_thread(*, first: bool) -> tuple[int, int]:
    """Of a thread that is started here, and of one that it starts itself."""
    found: list[int] = []

    def tell() -> None:
        found.append(os.sched_getscheduler(0))

    def run() -> None:
        if first:
            come_first()
        tell()
        inner = threading.Thread(target=tell)
        inner.start()
        inner.join()

    outer = threading.Thread(target=run)
    outer.start()
    outer.join()
    own, inherited = found
    return own, inherited


def test_what_starts_within_gives_way_and_the_caller_does_not_afterwards() -> None:
    before = os.sched_getscheduler(0)
    assert before == os.SCHED_OTHER, "tests run in the usual policy"
    with giving_way():
        assert policy_of_child() == os.SCHED_BATCH
        assert policies_in_thread(first=False) == (os.SCHED_BATCH, os.SCHED_BATCH)
    assert policy_of_child() == before


def test_a_thread_that_comes_first_takes_along_what_it_starts() -> None:
    with giving_way():
        assert policies_in_thread(first=True) == (os.SCHED_OTHER, os.SCHED_OTHER)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH


def test_the_policy_is_restored_after_an_error_and_others_are_left_alone() -> None:
    with pytest.raises(ZeroDivisionError), giving_way():
        _ = 1 / 0
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    be_idle = "import os; from cluster.priority import *; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    script = f"{be_idle}\nwith giving_way():\n    come_first()\n    {TELL}"
    idle = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(idle.stdout) == os.SCHED_IDLE, "somebody chose this policy for the whole of it"
