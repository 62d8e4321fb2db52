"""The gradient of a step is one number per parameter, however the step is cut; skipped steps change nothing."""

import logging

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

LENGTHS, RESPONSES = (9, 12, 7, 15, 30, 8), (4, 6, 3, 8, 20, 1)
CUTS = {
    "one_by_one": [[0], [1], [2], [3], [4], [5]],
    "one_batch": [[0, 1, 2, 3, 4, 5]],
    "uneven": [[4], [0, 5, 2], [3, 1]],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def actor_for(model_dir, **flags):
    """An actor whose one SGD step at rate 1 moves every parameter by minus its gradient."""
    from slime.backends.megatron_utils.actor import MegatronActor

    sgd = dict(optimizer="sgd", lr=1.0, sgd_momentum=0.0, clip_grad=0.0, global_batch_size=6)
    actor = MegatronActor(train_args(model_dir, **{**sgd, **flags}), 0, 1, "127.0.0.1", 0)
    actor.init()
    return actor


def gradient(model_dir, shard, **flags):
    """Gradient of the first step, by exported name."""
    actor = actor_for(model_dir, **flags)
    before = {name: tensor.clone() for name, tensor in actor.export_weights()}
    result = actor.train(0, shard)
    return {name: before[name] - tensor for name, tensor in actor.export_weights()}, result


def shard_of(cut, **columns):
    generator = torch.Generator().manual_seed(5)
    rollout = [-torch.rand(n, generator=generator) * 4 for n in RESPONSES]
    masks = [torch.ones(n, dtype=torch.int32) for n in RESPONSES]
    masks[0][1] = 0
    masks[2][:] = 0  # a fully masked sample
    values = dict(loss_masks=masks, rewards=[0.3, -1.2, 2.0, 0.7, -0.4, 1.1], rollout_log_probs=rollout)
    return make_shard(None, LENGTHS, RESPONSES, cut, **{**values, **columns})


def assert_same(a, b, atol=2e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


FLAGS = {
    "grpo": {},
    "per_token": {"calculate_per_token_loss": True},
    "gspo_rollout_logprobs": {"advantage_estimator": "gspo", "use_rollout_logprobs": True},
    "cispo_entropy": {"advantage_estimator": "cispo", "entropy_coef": 0.1, "use_rollout_logprobs": True},
    "tis_opsm": {"use_tis": True, "use_opsm": True},
    "dual_clip": {"eps_clip_c": 1.1, "use_rollout_logprobs": True},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_gradient_does_not_depend_on_micro_batches(model_dir, flags):
    reference, expected = gradient(model_dir, shard_of(CUTS["one_by_one"]), **flags)
    assert max(g.abs().max() for g in reference.values()) > 1e-3
    for cut in ("one_batch", "uneven"):
        other, got = gradient(model_dir, shard_of(CUTS[cut]), **flags)
        assert_same(reference, other)
        for name, value in expected["steps"][0].items():
            assert got["steps"][0][name] == pytest.approx(value, abs=1e-5, rel=1e-4), name
        for name in ("rollout/advantages", "rollout/rollout_log_probs", "rollout/response_lengths"):
            assert got["rollout"][name] == pytest.approx(expected["rollout"][name], abs=1e-5)


def reference_loss(model_dir, shard, flags):
    """GRPO objective written down with transformers and autograd, from the final formula."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    total, tokens = 0.0, 0
    for i, ids in enumerate(shard["tokens"]):
        logits = model(ids[None]).logits[0, :-1].float()
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0][-RESPONSES[i] :]
        mask = shard["loss_masks"][i].float()
        ratio = torch.exp(log_probs - log_probs.detach())
        values = -ratio * shard["rewards"][i] * mask
        total = total + (
            values.sum() if flags.get("calculate_per_token_loss") else values.sum() / mask.sum().clamp(min=1)
        )
        tokens += max(int(mask.sum()), 1)
    (total / (tokens if flags.get("calculate_per_token_loss") else len(RESPONSES))).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["grpo", "per_token"])
def test_gradient_equals_the_formula_in_transformers(model_dir, name):
    shard = shard_of(CUTS["uneven"])
    ours, _ = gradient(model_dir, shard, **FLAGS[name])
    assert_same(reference_loss(model_dir, shard, FLAGS[name]), ours)


def test_recomputing_the_loss_changes_no_number(model_dir):
    flags = dict(entropy_coef=0.1, use_tis=True)
    reference, expected = gradient(model_dir, shard_of(CUTS["uneven"]), **flags)
    again, got = gradient(model_dir, shard_of(CUTS["uneven"]), recompute_loss_function=True, **flags)
    assert_same(reference, again, atol=0)
    assert got["steps"] == expected["steps"]


def test_log_prob_passes_may_be_cut_differently(model_dir):
    flags = dict(keep_old_actor=True, use_kl_loss=True, kl_loss_coef=0.1, use_dynamic_batch_size=True)
    reference, expected = gradient(model_dir, shard_of(CUTS["one_by_one"]), **flags)
    other, got = gradient(model_dir, shard_of(CUTS["one_by_one"]), log_probs_max_tokens_per_gpu=40, **flags)
    assert_same(reference, other)
    assert got["rollout"]["rollout/log_probs"] == pytest.approx(expected["rollout"]["rollout/log_probs"], abs=1e-6)


def test_padded_vocabulary_has_no_probability(model_dir):
    reference, expected = gradient(model_dir, shard_of(CUTS["uneven"]), entropy_coef=0.1)
    padded, got = gradient(model_dir, shard_of(CUTS["uneven"]), entropy_coef=0.1, make_vocab_size_divisible_by=128)
    assert_same(reference, padded)
    assert got["steps"][0]["train/entropy_loss"] == pytest.approx(expected["steps"][0]["train/entropy_loss"], abs=1e-6)


def test_siblings_of_one_rollout_count_once(model_dir):
    """Two samples with one rollout id share a denominator: the same gradient in one micro-batch or two."""
    sums = torch.tensor([3.0 + 6, 3.0 + 6, 0, 8, 20, 1])
    columns = dict(rollout_mask_sums=sums, global_batch_sizes=[5], rollout_ids=[0, 0, 1, 2, 3, 4])
    reference, _ = gradient(model_dir, shard_of(CUTS["one_batch"], **columns), global_batch_size=5)
    split, _ = gradient(model_dir, shard_of(CUTS["one_by_one"], **columns), global_batch_size=5)
    assert_same(reference, split)


def test_fb_l14_sft_loss_trains_exactly_the_unmasked_response_tokens(model_dir):
    masks = [torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1])]
    shard = make_shard(None, (9, 7), (4, 3), [[0, 1]], loss_masks=[m.int() for m in masks], global_batch_sizes=[2])
    flags = dict(
        loss_type="sft_loss", calculate_per_token_loss=True, compute_advantages_and_returns=False, global_batch_size=2
    )
    _, result = gradient(model_dir, shard, **flags)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    losses = []
    for ids, trained in zip(shard["tokens"], ([5, 6], [6]), strict=True):
        log_probs = torch.log_softmax(model(ids[None]).logits[0], -1)
        losses += [-log_probs[t - 1, ids[t]] for t in trained]
    assert result["steps"][0]["train/loss"] == pytest.approx(float(sum(losses)) / 3, abs=1e-5)


def test_temperature_divides_training_and_old_log_probs(model_dir):
    _, result = gradient(
        model_dir, shard_of(CUTS["one_batch"]), rollout_temperature=0.5, use_kl_loss=True, kl_loss_coef=0.1
    )
    assert result["steps"][0]["train/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert result["steps"][0]["train/ppo_kl"] == 0
    assert result["rollout"]["rollout/log_probs"] == pytest.approx(result["rollout"]["rollout/ref_log_probs"], abs=1e-6)
    _, plain = gradient(model_dir, shard_of(CUTS["one_batch"]))
    assert abs(plain["rollout"]["rollout/log_probs"] - result["rollout"]["rollout/log_probs"]) > 0.1


def test_custom_loss_sees_the_whole_stream(model_dir, tmp_path):
    hook = tmp_path / "hook_loss.py"
    hook.write_text(
        "import torch\n"
        "def loss(args, batch, logits, reducer):\n"
        "    lp = torch.log_softmax(logits[0].float(), -1)\n"
        "    rows, start = [], 0\n"
        "    for ids, n in zip(batch['tokens'], batch['response_lengths']):\n"
        "        end = start + len(ids)\n"
        "        rows.append(lp[end - n - 1 : end - 1].gather(-1, ids[-n:, None])[:, 0])\n"
        "        start = end\n"
        "    value = -reducer(torch.cat(rows))\n"
        "    return value, {'mine': value}\n"
    )
    shard = shard_of(CUTS["uneven"])
    common = dict(compute_advantages_and_returns=False)
    reference, expected = gradient(model_dir, shard, loss_type="sft_loss", **common)
    ours, got = gradient(model_dir, shard, loss_type="custom_loss", custom_loss_function_path=f"{hook}:loss", **common)
    assert_same(reference, ours)
    assert got["steps"][0]["train/mine"] == pytest.approx(expected["steps"][0]["train/loss"], abs=1e-5)


def test_fb_l11_non_finite_numbers_skip_the_step_and_name_the_sample(model_dir, caplog):
    rewards = [0.3, -1.2, 2.0, float("nan"), -0.4, 1.1]
    shard = shard_of(CUTS["one_by_one"], rewards=rewards)
    with caplog.at_level(logging.WARNING):
        difference, result = gradient(model_dir, shard)
    assert all(bool((d == 0).all()) for d in difference.values())
    assert result["steps"][0]["train/step_skipped"] == 1
    assert "[103]" in caplog.text and "parameters are unchanged" in caplog.text


def test_fb_l11_huge_log_ratios_stay_finite(model_dir):
    rollout = [torch.full((n,), -1000.0) for n in RESPONSES]
    rollout[1][0] = float("nan")
    difference, result = gradient(
        model_dir, shard_of(CUTS["one_batch"], rollout_log_probs=rollout), use_rollout_logprobs=True
    )
    assert all(bool(torch.isfinite(d).all()) for d in difference.values())


def test_frozen_parameters_stay(model_dir):
    difference, _ = gradient(model_dir, shard_of(CUTS["one_batch"]), freeze_params_name_list=["mlp", "embedding"])
    moved = {name for name, d in difference.items() if bool((d != 0).any())}
    assert moved and not any("mlp" in name or "embed" in name for name in moved)
