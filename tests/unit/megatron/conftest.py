"""One gloo process of world size 1 for each test module of the Megatron backend, gone when the module ends."""

import socket

import pytest

from slime.backends.megatron_utils import cpu_compat
from tests.unit.megatron.megatron_helpers import train_args

cpu_compat.install()


@pytest.fixture(scope="module", autouse=True)
def single_rank():
    from slime.backends.megatron_utils import initialize

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    initialize.initialize(train_args(), 0, 1, "127.0.0.1", port)
    yield
    initialize.shutdown()
