"""Process groups outside WORLD, in one process."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from slime.utils.process_groups import destroy_process_group, init_process_group


def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(params=["no WORLD", "a WORLD"])
def world(request):
    if request.param == "no WORLD":
        yield None
        return
    dist.init_process_group("gloo", init_method=address(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_group_broadcasts_and_its_name_is_free_again(world):
    for value in (3.0, 4.0):
        group = init_process_group("gloo", address(), 1, 0, "same-name", 10)
        tensor = torch.full((2,), value)
        dist.broadcast(tensor, src=0, group=group)
        destroy_process_group(group)
    if world is not None:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1


def test_missing_peers_are_an_error_that_names_group_and_deadline():
    with pytest.raises(RuntimeError, match=r"'lonely' .*rank 1 of 2.*not formed within 0.5 s"):
        init_process_group("gloo", address(), 2, 1, "lonely", 0.5)
