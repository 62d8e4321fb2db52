"""`--rollout-top-p` below 1: the trainer's log-probs are among the tokens that the engine kept, like the engine's."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.test_sync_loop import SMALL

TOP_P = ("--rollout-top-p", 0.9, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 128)


def test_trainer_and_engine_agree_under_top_p(train, tmp_path):
    """On two tensor ranks, over several steps; without the replay the gap would be near log 0.9."""
    dump = tmp_path / "dump_{rollout_id}.pt"
    run = train(
        *(*SMALL, *TOP_P, "--num-rollout", 2, "--num-steps-per-rollout", 2, "--rollout-temperature", 0.8),
        *("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel"),
        *("--use-kl-loss", "--kl-loss-coef", 0.01, "--save-debug-rollout-data", dump),
    )
    assert "sglang-router drops custom_params" in run.output
    assert max(run.series("rollout/train_rollout_logprob_abs_diff_max")) < 5e-5
    assert abs(run.series("train/kl_loss")[0]) < 1e-8  # the reference is restricted to the same tokens
    assert 2 < min(run.series("rollout/top_p_kept_vocab_per_token")) < 258
    samples = torch.load(tmp_path / "dump_1.pt", weights_only=True)["samples"]
    assert all(len(s["rollout_top_p_token_offsets"]) == s["response_length"] + 1 for s in samples)


@pytest.mark.slow
def test_streamed_partial_responses_keep_their_record(train, tmp_path):
    """With a learning rate of 0, so that all parts of a response come from the same weights.

    Four of eight groups fill the first round while the others have hundreds of tokens to go.
    """
    dump = tmp_path / "dump_{rollout_id}.pt"
    run = train(
        *(*SMALL, *TOP_P, "--num-rollout", 4, "--lr", 0, "--partial-rollout", "--over-sampling-batch-size", 8),
        *("--rollout-max-response-len", 400, "--sglang-context-length", 512, "--save-debug-rollout-data", dump),
        *("--custom-generate-function-path", "tests.e2e.hooks.uneven_streams"),
    )
    assert max(run.series("rollout/train_rollout_logprob_abs_diff_max")) < 5e-5
    dumps = [torch.load(tmp_path / f"dump_{i}.pt", weights_only=True)["samples"] for i in range(4)]
    assert any(len(set(sample["token_weight_versions"])) > 1 for samples in dumps for sample in samples)
