"""A rank that sends weights walks its export to the end whatever happens: other ranks take part in it. The disk transport: what
a rank writes, whom it tells, and what it leaves."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.ray import actor_group
from slime.ray.train_actor import TrainActor
from slime.utils.hook_calls import HookError


class Exporting:
    """Stands in for the Megatron actor: an export of three tensors, of which other ranks hold parts."""

    def __init__(self):
        self.walked = 0

    def export_weights(self):
        for i in range(3):
            self.walked += 1
            yield f"w{i}", None

    export_base = export_weights

    def weights_in_place(self):
        return nullcontext()

    def remember(self, version, in_use):
        """Nothing is kept."""

    def export_adapters(self):
        return {}

    def adapter_config(self):
        return {}


class Publisher:
    clients = ["an engine"]

    def update(self, tensors, version, finish=None):
        next(tensors)
        raise RuntimeError("the engine refused")


@pytest.mark.parametrize("lora_sync", ["merged", "adapter"])
def test_a_failing_update_leaves_no_rank_waiting_in_the_export(lora_sync):
    args = SimpleNamespace(
        lora_sync=lora_sync,
        lora_base="start",
        hf_checkpoint="model",
        rollout_num_gpus_per_engine=1,
        run_dir="run",
        update_weight_transport="nccl",
    )
    rank = TrainActor(args, 0, 2, "127.0.0.1")
    rank._actor, rank._publisher = Exporting(), Publisher()
    with pytest.raises(RuntimeError, match="the engine refused"):
        rank.update_weights(["an engine"], 1, set())
    assert rank._actor.walked == 3


def test_nor_does_a_failing_comparison():
    class Engine:
        def weights_checker(self, action):
            raise RuntimeError("the engine refused")

    rank = TrainActor(SimpleNamespace(lora_sync="merged", lora_base=None, hf_checkpoint=None), 0, 2, "127.0.0.1")
    rank._actor, rank._publisher = Exporting(), SimpleNamespace(clients=[Engine()])
    with pytest.raises(RuntimeError, match="the engine refused"):
        rank.check_weights(1)
    assert rank._actor.walked == 3


URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


def disk_rank(folder: Path, rank: int = 0, **changes) -> TrainActor:
    """A rank of two that writes a file of eight bytes as its export."""

    def save_hf(path: str) -> None:
        os.makedirs(path, exist_ok=True)
        Path(path, "model.safetensors").write_bytes(b"12345678")

    values = dict(
        update_weight_transport="disk", update_weight_disk_dir=str(folder), update_weight_disk_keep_files=False
    )
    values |= dict(custom_update_weight_post_write_path=None, distributed_timeout_minutes=0.1, lora_sync="merged")
    values |= dict(update_weight_buffer_size=1, lora_base=None, hf_checkpoint=None, rollout_num_gpus_per_engine=1)
    actor = TrainActor(SimpleNamespace(**(values | changes)), rank, 2, "127.0.0.1")
    actor._actor = SimpleNamespace(save_hf=save_hf, remember=lambda *_: None)
    return actor


class Loading:
    """A publisher whose engines take what they are given, or refuse it."""

    def __init__(self, folder: Path, fails: bool = False):
        self.clients, self.folder, self.fails, self.seen = [SimpleNamespace(base_url=URLS[0])], folder, fails, []

    def update(self, tensors, version, finish):
        assert tensors is None
        self.seen.append((version, sorted(os.listdir(self.folder))))
        if self.fails:
            raise RuntimeError("the engine refused")


def test_a_hook_that_fails_is_named_with_its_flag_and_place(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def f(args, version_dir, rollout_engines):\n    raise KeyError(version_dir[-3:])\n"
    )
    actor = disk_rank(tmp_path, custom_update_weight_post_write_path=f"{tmp_path}/mine.py:f")
    with pytest.raises(
        HookError, match="(?s)^--custom-update-weight-post-write-path .*mine.py:f raised KeyError: '007'.*line 2"
    ):
        actor.write_weights(URLS, 7)


def test_a_folder_that_cannot_be_written_is_named_with_its_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RuntimeError, match="--update-weight-disk-dir: .*file/weight_v000001 could not be written: .*Not a dir"
    ):
        disk_rank(tmp_path / "file").write_weights(URLS, 1)


def test_a_hook_that_hangs_is_named_by_the_wait(monkeypatch):
    class Rank:
        def __init__(self, **snapshot):
            self.write_weights = SimpleNamespace(remote=lambda urls, version: "written")
            self.progress = SimpleNamespace(remote=lambda: {"phases": {}} | snapshot)

    seen = []

    def wait_for(calls, what, *, deadline_s, on_poll=None):
        if on_poll is not None:
            seen.append((calls, on_poll()))
        return calls

    monkeypatch.setattr(actor_group, "wait_for", wait_for)
    group = actor_group.ActorGroup.__new__(actor_group.ActorGroup)
    group._args = SimpleNamespace(custom_update_weight_post_write_path="mine.f", stall_timeout=1)
    group._ranks = [Rank(), Rank(**{"oldest hook": "--flag mine.f"})]
    group.write_weights(URLS, 1, lambda: seen.append("engines checked"))
    assert seen == ["engines checked", (["written"] * 2, "--flag mine.f")]


@pytest.mark.parametrize("keeps", [False, True])
def test_the_folder_goes_when_all_engines_hold_it_unless_it_is_kept(tmp_path, keeps):
    actor = disk_rank(tmp_path, update_weight_disk_keep_files=keeps)
    actor._publisher = publisher = Loading(tmp_path)
    for version in (4, 5):
        actor.write_weights(URLS, version)
        metrics = actor.update_weights(URLS, version, set())
        assert metrics["rollout/weight_version"] == version and metrics["perf/update_weights_wire_bytes"] == 8
        assert 0 < metrics["perf/update_weights_write_time"] < metrics["perf/update_weights_time"]
    names = ["weight_v000004", "weight_v000005"]
    assert publisher.seen == [("4", names[:1]), ("5", names if keeps else names[1:])]
    assert sorted(os.listdir(tmp_path)) == (names if keeps else [])


def test_a_folder_that_an_engine_refused_stays(tmp_path):
    actor = disk_rank(tmp_path)
    actor._publisher = Loading(tmp_path, fails=True)
    actor.write_weights(URLS, 4)
    with pytest.raises(RuntimeError, match="the engine refused"):
        actor.update_weights(URLS, 4, set())
    assert os.listdir(tmp_path) == ["weight_v000004"]


def test_rank_0_alone_has_engines_read(tmp_path):
    assert [client.base_url for client in disk_rank(tmp_path)._make_publisher(URLS).clients] == URLS
    other = disk_rank(tmp_path, rank=1)
    assert other.update_weights(URLS, 1, set()) == {} and other._publisher.clients == []
