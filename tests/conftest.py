"""What holds for every test."""

from __future__ import annotations

import random
import signal
import sys

import pytest


def pytest_configure(config):
    """Ctrl-C is heard by the tests and by what they start, also where the suite runs in the background of a script, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test draws the same numbers, whichever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
