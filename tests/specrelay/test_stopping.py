"""Signals are sent to a process of their own: this one's handlers stay as they are."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal
from specrelay.stopping import StopSignals, wait_for_signal
signals = StopSignals()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signals.install()
try:
    print("waiting", flush=True)
    wait_for_signal()
except KeyboardInterrupt:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    print("stopped whole", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_stops_once_and_later_ones_do_not_break_the_stop(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert process.stdout.read() == "stopped whole\n"
        assert process.wait(timeout=10) == 0


HELD = """
import signal
from specrelay.stopping import StopSignals
signals = StopSignals()
signals.install()
try:
    with signals.held():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        print("started whole", flush=True)
    print("not reached", flush=True)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def test_a_held_signal_takes_effect_at_the_end_of_the_block() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "started whole\nstopped\n"
