"""Threads that compute get a processor each."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.threads import bind_workers

PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def on_new_thread(num_threads: int, call: Callable[[], object]) -> object:
    results: list[object] = []

    def run() -> None:
        torch.set_num_threads(num_threads)
        results.append(call())

    before = torch.get_num_threads()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    torch.set_num_threads(before)
    return results[0]


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor has nothing to share")
def test_the_thread_and_its_workers_are_bound_one_to_a_processor() -> None:
    def bound() -> tuple[bool, list[int]]:
        before = threads()
        done = bind_workers()
        return done, sorted({cpu for thread in {0, *(threads() - before)} for cpu in os.sched_getaffinity(thread)})

    assert on_new_thread(len(PROCESSORS), bound) == (True, PROCESSORS)


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor has nothing to share")
def test_fewer_threads_than_processors_are_left_to_the_system() -> None:
    def unbound() -> tuple[bool, list[int]]:
        return bind_workers(), sorted(os.sched_getaffinity(0))

    assert on_new_thread(1, unbound) == (False, PROCESSORS)
