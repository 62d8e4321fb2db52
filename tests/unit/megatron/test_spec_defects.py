"""Known faults that need a trainer to show (D5, D9), dr_grpo's constant denominator, and the mismatch numbers of a round."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.hook_results import check_same_count
from slime.backends.megatron_utils.loss import add_step_sums
from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard
from tests.unit.megatron.test_gradients import CUTS, LENGTHS, RESPONSES, actor_for, assert_same, gradient, shard_of


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def test_d5_distillation_gap_is_reported_by_round_and_by_step(model_dir):
    shard = shard_of(CUTS["uneven"], teacher_log_probs=[torch.full((n,), -2.0) for n in RESPONSES])
    _, result = gradient(model_dir, shard, use_opd=True, opd_type="sglang")
    step, round_ = result["steps"][0]["train/opd_reverse_kl"], result["rollout"]["rollout/opd_reverse_kl"]
    assert step == pytest.approx(round_, abs=1e-6)
    assert step == pytest.approx(result["rollout"]["rollout/log_probs"] + 2.0 * 5 / 6, abs=1e-4)  # one sample is masked


def test_d9_the_reported_kl_is_masked_like_its_siblings(model_dir):
    """A masked token with a KL of 1000 is not in the report."""
    from slime.backends.megatron_utils.metrics import rollout_metrics
    from tests.unit.megatron.megatron_helpers import train_args

    masks = [torch.tensor([1, 0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)]
    policy = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0])]
    reference = [torch.tensor([-1.1, -1001.0, -1.3]), torch.tensor([-2.4])]
    shard = make_shard(None, (5, 3), (3, 1), loss_masks=masks, kl=policy, log_probs=policy, ref_log_probs=reference)
    assert rollout_metrics(train_args(), shard)["rollout/kl"] == pytest.approx((0.2 + 0.4) / 2, rel=1e-4)
    del shard["ref_log_probs"]
    assert "rollout/kl" not in rollout_metrics(train_args(), shard)


def test_kl_of_a_round_is_reported_although_no_pass_was_made_for_it(model_dir):
    """One step, KL in the loss only: the old log-probs are those of training, and the report says the same as the loss."""
    other = dict(use_kl_loss=True, kl_loss_coef=0.1)
    actor = actor_for(model_dir, **other, lr=0.05, num_rollout=3)
    results = [actor.train(i, shard_of(CUTS["uneven"])) for i in range(2)]
    assert "perf/log_probs_time" not in results[1]["rollout"]
    assert abs(results[1]["steps"][1]["train/kl_loss"]) > 1e-5
    for i, result in enumerate(results):
        assert result["rollout"]["rollout/kl"] == pytest.approx(result["steps"][i]["train/kl_loss"], abs=1e-6)


def test_batch_normalised_corrections_name_the_missing_rollout_log_probs():
    args = SimpleNamespace(
        custom_tis_function_path="slime.algorithms.off_policy_hooks.mis_function",
        use_tis=True,
        get_mismatch_metrics=False,
        tis_batch_normalize=True,
    )
    with pytest.raises(ValueError, match="--use-tis .* need rollout_log_probs"):
        add_step_sums(args, [], {"log_probs": [], "loss_masks": []})


def tis_of(monkeypatch, result):
    """Arguments with a TIS function of the user's whose `step_sums` gives `result`, or is it where that is no list."""
    name = f"tis_{id(monkeypatch)}_{id(result)}"  # paths are loaded once
    module = ModuleType(name)
    module.correct = lambda args, **columns: None
    module.correct.step_sums = (lambda args: lambda *columns: result[0]) if isinstance(result, list) else result
    monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(custom_tis_function_path=f"{name}.correct", use_tis=True, get_mismatch_metrics=False)


@pytest.mark.parametrize(
    ("result", "what"),
    [
        ([None], "that returned None"),
        ([3.0], "that returned 3.0"),
        ([[[1.0], [2.0]]], r"that returned \[\[1.0"),
        ([["x"]], r"that returned \['x'\]"),
        ([{"sum": 1.0}], "that returned {'sum'"),
        ([[1.0, float("nan")]], r"that returned \[1.0, nan"),
        (lambda args: [1.0], "a list"),
        ("sums", "a str"),
    ],
)
def test_step_sums_that_are_no_list_of_numbers_show_what_is_expected(monkeypatch, result, what):
    expected = r"expected step_sums\(args\) -> None or a function .* -> list of finite numbers"
    with pytest.raises(ValueError, match=f"--custom-tis-function-path tis_.*correct has step_sums {what}.*{expected}"):
        add_step_sums(tis_of(monkeypatch, result), [], {"rollout_log_probs": []})


@pytest.mark.parametrize("sums", [[1.5, 2], (1.5, 2), torch.tensor([1.5, 2.0], requires_grad=True), []])
def test_step_sums_may_be_any_list_of_numbers(monkeypatch, sums):
    data = {"rollout_log_probs": []}
    add_step_sums(tis_of(monkeypatch, [sums]), [], data)
    assert data["tis_step_sums"] == tuple(float(value) for value in sums)
    add_step_sums(tis_of(monkeypatch, lambda args: None), [], others := {})
    assert others == {}


def test_step_sums_of_another_length_on_another_rank_are_an_error(monkeypatch):
    def with_other_rank(counts, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        counts.copy_(torch.maximum(counts, torch.tensor([3, -3])))

    monkeypatch.setattr(torch.distributed, "all_reduce", with_other_rank)
    args = tis_of(monkeypatch, lambda args: None)
    check_same_count(args, 3, None)
    with pytest.raises(ValueError, match="has step_sums that returned 2 to 3 numbers; .*of one length on every rank"):
        check_same_count(args, 2, None)


class TestShippedCorrections:
    """IcePop and MIS as `--custom-tis-function-path`, in the trainer."""

    HOOKS = "slime.algorithms.off_policy_hooks."

    def run(self, model_dir, cut, function, options=(), **flags):
        actor = actor_for(model_dir, custom_tis_function_path=self.HOOKS + function, **flags)
        vars(actor.args).update(options)
        before = {name: tensor.clone() for name, tensor in actor.export_weights()}
        metrics = actor.train(0, shard_of(CUTS[cut]))["steps"][0]
        return {name: before[name] - tensor for name, tensor in actor.export_weights()}, metrics

    @pytest.mark.parametrize(
        "function, options",
        [
            ("icepop_function", {"tis_clip_low": 0.5}),
            ("mis_function", {"tis_mode": "mask", "tis_upper_bound": 3.0}),
            (
                "mis_function",
                {"tis_level": "geometric", "use_rs": True, "rs_level": "sequence", "rs_veto_threshold": 1e-4},
            ),
        ],
    )
    def test_gradient_does_not_depend_on_micro_batches(self, model_dir, function, options):
        first, metrics = self.run(model_dir, "one_by_one", function, options, use_tis=True)
        second, again = self.run(model_dir, "uneven", function, options, use_tis=True)
        assert_same(first, second)
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        plain, _ = gradient(model_dir, shard_of(CUTS["uneven"]))
        assert any(not torch.allclose(first[name], plain[name], atol=1e-4) for name in plain)

    def test_measuring_alone_leaves_the_gradient(self, model_dir):
        measured, metrics = self.run(model_dir, "uneven", "mis_function", get_mismatch_metrics=True)
        plain, _ = gradient(model_dir, shard_of(CUTS["uneven"]))
        assert_same(plain, measured)
        assert metrics["train/mis_k3_kl"] > 0 and metrics["train/mis_rollout_ppl"] > 1


def test_dr_grpo_divides_every_response_by_the_same_length(model_dir):
    """The gradient of the formula: token sums over the longest allowed response, whatever a sample's own length."""
    from transformers import AutoModelForCausalLM

    shard = shard_of(CUTS["uneven"])
    ours, _ = gradient(model_dir, shard, advantage_estimator="dr_grpo", rollout_max_response_len=40)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    total = 0.0
    for i, ids in enumerate(shard["tokens"]):
        logits = model(ids[None]).logits[0, :-1].float()
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0][-RESPONSES[i] :]
        ratio = torch.exp(log_probs - log_probs.detach())
        total = total - (ratio * shard["rewards"][i] * shard["loss_masks"][i]).sum() / 40
    (total / len(LENGTHS)).backward()
    assert_same({name: p.grad for name, p in model.named_parameters()}, ours)


class TestMismatchOfARound:
    NAMES = ("logprob_abs_diff", "logprob_abs_diff_max", "kl", "k3_kl", "ess", "alarm")

    def numbers(self, result):
        return {name: result["rollout"][f"rollout/train_rollout_{name}"] for name in self.NAMES}

    def test_numbers_do_not_depend_on_cuts_passes_or_reductions(self, model_dir):
        """With an old-policy pass, with the forward of training, per token or per rollout: one truth about the tokens."""
        expected = self.numbers(gradient(model_dir, shard_of(CUTS["one_by_one"]))[1])
        for cut, flags in (
            ("uneven", {}),
            ("one_batch", {"keep_old_actor": True}),
            ("uneven", {"use_rollout_logprobs": True}),
            ("one_batch", {"calculate_per_token_loss": True, "use_tis": True}),
        ):
            got = self.numbers(gradient(model_dir, shard_of(CUTS[cut]), **flags)[1])
            assert got == pytest.approx(expected, rel=1e-4), (cut, flags)
        assert expected["logprob_abs_diff"] > 1 and expected["alarm"] == 1.0 and 0 < expected["ess"] < 1

    def test_later_steps_of_a_round_do_not_count(self, model_dir):
        """The engine's log-probs as old policy, three steps: only the first is taken with the weights that generated."""
        several = shard_of([[0, 1], [2, 3], [4, 5]], num_microbatches=[1, 1, 1], global_batch_sizes=[2, 2, 2])
        flags = dict(use_rollout_logprobs=True, global_batch_size=2, lr=50.0)
        got = self.numbers(gradient(model_dir, several, **flags)[1])
        first = shard_of([[0, 1]], global_batch_sizes=[2])
        count = len(LENGTHS)
        first = {k: v[:2] if isinstance(v, list) and len(v) == count else v for k, v in first.items()}
        first["rollout_mask_sums"] = first["rollout_mask_sums"][:2]
        assert got == pytest.approx(self.numbers(gradient(model_dir, first, **flags)[1]), rel=1e-4)

    def test_alarm_follows_the_flag(self, model_dir):
        for flags, alarm in (({"mismatch_alarm": 0.0}, 0.0), ({"mismatch_alarm": 1e-9}, 1.0)):
            assert self.numbers(gradient(model_dir, shard_of(CUTS["uneven"]), **flags)[1])["alarm"] == alarm

    def test_default_bound_is_strict_only_for_equal_arithmetic_and_weights(self):
        from slime.backends.megatron_utils.mismatch import LOOSE, STRICT, alarm_threshold
        from tests.unit.megatron.megatron_helpers import train_args

        assert alarm_threshold(train_args()) == STRICT
        for flags in ({"precision": "bf16"}, {"rollout_precision": "bf16"}, {"update_weights_interval": 2}):
            assert alarm_threshold(train_args(**flags)) == LOOSE
        assert alarm_threshold(train_args(mismatch_alarm=0.2)) == 0.2

    def test_data_without_engine_log_probs_has_no_numbers(self, model_dir):
        shard = shard_of(CUTS["one_batch"])
        del shard["rollout_log_probs"]
        assert not any("train_rollout" in name for name in gradient(model_dir, shard)[1]["rollout"])
