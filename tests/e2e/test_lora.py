"""Runs that train low-rank adapters, through the public command."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from slime.utils.tiny_model import Experts, make_tiny_model
from tests.e2e.conftest import write_rows

SMALL = (
    "--rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 6 --sglang-context-length 64 "
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --lr 1e-2 --custom-rm-path tests.e2e.hooks.first_token_is_even "
    "--lora-rank 8 --lora-sync adapter --check-weight-update-equal --use-kl-loss --kl-loss-coef 0.001"
).split()


def test_adapter_only_sync_keeps_trainer_and_engine_together(train, tmp_path):
    """Started, continued, and learning: engines hold the base and get nothing but the adapter."""
    flags = (*SMALL, "--save", tmp_path / "save", "--save-interval", 3)
    first = train(*flags, "--num-rollout", 3, name="first")
    second = train(*flags, "--num-rollout", 6, name="second")
    gaps = first.series("train/train_rollout_logprob_abs_diff") + second.series("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 6 and max(gaps) < 1e-4
    kl = first.series("train/kl_loss") + second.series("train/kl_loss")
    assert abs(kl[0]) < 1e-8 and kl[-1] > 1e-4  # the policy left the base, and engines with it
    folder = tmp_path / "save" / "iter_0000005" / "adapters" / "actor"
    tensors = load_file(folder / "adapter_model.safetensors")
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    assert any(bool(tensor.any()) for name, tensor in tensors.items() if "lora_B" in name)
    sent = first.series("perf/update_weights_wire_bytes")
    assert set(sent) == {sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())}


@pytest.mark.slow
def test_adapters_of_experts_are_served_as_they_are_trained(train, tmp_path):
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe", experts=Experts(count=8, dense_layers=(0,)))
    run = train(
        *(*SMALL, "--hf-checkpoint", model, "--num-rollout", 3, "--save", tmp_path / "save"),
        *("--target-modules", "q_proj", "gate_proj", "up_proj", "down_proj", "--use-rollout-routing-replay"),
    )
    gaps, kl = run.series("train/train_rollout_logprob_abs_diff"), run.series("train/kl_loss")
    assert len(gaps) == 3 and max(gaps) < 1e-4 and kl[-1] > 1e-4
    tensors = load_file(tmp_path / "save" / "iter_0000002" / "adapters" / "actor" / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in tensors.items() if ".experts.5." in name and "lora_B" in name)


@pytest.mark.slow
def test_two_adapters_are_trained_and_served_side_by_side(train, tmp_path):
    """Each sample is generated and trained with its own: with the other one the log-probs would be far apart."""
    rows = [{"prompt": f"{i:04d}=", "metadata": {"lora": "ab"[i % 2]}} for i in range(64)]
    run = train(
        *SMALL,
        *("--prompt-data", write_rows(tmp_path / "two.jsonl", rows), "--lora-adapters", "a", "b"),
        *("--num-rollout", 3, "--save", tmp_path / "save"),
    )
    gaps, kl = run.series("train/train_rollout_logprob_abs_diff"), run.series("train/kl_loss")
    assert len(gaps) == 3 and max(gaps) < 1e-4 and kl[-1] > 1e-4
    folder = tmp_path / "save" / "iter_0000002" / "adapters"
    a, b = (load_file(folder / name / "adapter_model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    apart = [float((a[name] - b[name]).abs().max()) for name in a if "lora_B" in name]
    assert min(apart) > 1e-3
