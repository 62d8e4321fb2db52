"""Weights through version folders on a disk, through the public commands. test_colocate.py compares them with the other transports."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from slime.utils.quantized_folder import fp8_config, quantize_folder
from slime.utils.tiny_model import Experts, make_tiny_model
from tests.e2e.conftest import REPO

SMALL = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --sglang-context-length 64 --lr 1e-3 "
    "--custom-rm-path tests.e2e.hooks.first_token_is_even --check-weight-update-equal --update-weight-transport disk "
    "--update-weight-disk-keep-files --rollout-num-gpus 1"
).split()


def test_look_ahead_loop_with_tensor_ranks_keeps_the_folders_that_engines_read(train, tmp_path):
    """The last one is what --save-hf exports of the same weights."""
    folder = tmp_path / "weights"
    (folder / ".weight_v000007.incomplete").mkdir(parents=True)  # of a run that was killed under a write
    run = train(
        *(*SMALL, "--update-weight-disk-dir", folder, "--num-rollout", 3, "--save-hf", tmp_path / "export"),
        *("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel"),
        *("--custom-update-weight-post-write-path", f"{REPO}/examples/hooks/weights_written.py:flush"),
        script="train_async.py",
    )
    assert len(run.series("train/loss")) == 3
    assert sorted(path.name for path in folder.glob("*weight*")) == [f"weight_v{version:06d}" for version in range(4)]
    versions = [load_file(path / "model.safetensors") for path in sorted(folder.glob("*weight*"))]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert versions[3].keys() == exported.keys()
    assert all(torch.equal(versions[3][name], exported[name]) for name in exported)
    assert any(not torch.equal(versions[2][name], exported[name]) for name in exported)
    sizes = {(path / "model.safetensors").stat().st_size for path in folder.glob("*weight*")}
    assert set(run.series("perf/update_weights_wire_bytes")) == sizes
    assert all(seconds > 0 for seconds in run.series("perf/update_weights_write_time"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["experts on two stages", "fp8"])
def test_folders_have_the_form_of_the_checkpoint(train, workspace, tmp_path, kind):
    if kind == "fp8":
        quantize_folder(workspace.model, tmp_path / "model", fp8_config((128, 128)))
        flags = ("--actor-num-gpus-per-node", 1, "--load", workspace.model)
    else:
        experts = Experts(count=8, dense_layers=(0,))
        make_tiny_model(tmp_path / "model", arch="qwen3_moe", experts=experts)
        flags = ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--colocate")
    run = train(
        *(*SMALL, *flags, "--hf-checkpoint", tmp_path / "model", "--num-rollout", 2),
        *("--update-weight-disk-dir", tmp_path / "weights"),
    )
    assert len(run.series("train/loss")) == 2
    first, source = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "weights" / "weight_v000000", tmp_path / "model")
    )
    assert {name: (t.dtype, t.shape) for name, t in first.items()} == {
        name: (t.dtype, t.shape) for name, t in source.items()
    }


@pytest.mark.slow
def test_a_continued_run_goes_on_counting_folders_and_replaces_what_it_finds(train, tmp_path):
    flags = (*SMALL, "--update-weight-disk-dir", tmp_path / "weights", "--actor-num-gpus-per-node", 1, "--lora-rank", 4)
    flags += ("--save", tmp_path / "save", "--save-interval", 1)
    train(*flags, "--num-rollout", 2, name="first")
    first = load_file(tmp_path / "weights" / "weight_v000002" / "model.safetensors")
    (tmp_path / "weights" / "weight_v000003").mkdir()
    (tmp_path / "weights" / "weight_v000003" / "model-00002-of-00002.safetensors").write_text("of nobody")
    second = train(*flags, "--num-rollout", 3, name="second")
    folders = sorted((tmp_path / "weights").glob("*weight*"))
    assert [path.name for path in folders] == [f"weight_v{version:06d}" for version in range(4)]
    again = load_file(tmp_path / "weights" / "weight_v000002" / "model.safetensors")  # sent anew at the start
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not (tmp_path / "weights" / "weight_v000003" / "model-00002-of-00002.safetensors").exists()
    assert max(second.series("train/train_rollout_logprob_abs_diff")) < 1e-4
