"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure(config):
    """Ctrl-C is heard by the tests and by what they start, also where the suite runs in the background of a script, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
