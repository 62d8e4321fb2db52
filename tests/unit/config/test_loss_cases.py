"""Field cases of losses that are decided at start: what would train nothing, or something else than meant, is refused."""

from __future__ import annotations

import pytest

from slime.config import UserError
from slime.config.validate import fit_to_async_loop


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_fb_l15_one_sample_per_prompt_is_refused_with_the_reason(parse, estimator):
    with pytest.raises(
        UserError, match=f"n-samples-per-prompt 1 with --advantage-estimator {estimator}: every advantage"
    ):
        parse("--n-samples-per-prompt", "1", "--advantage-estimator", estimator, "--rollout-max-response-len", "8")


@pytest.mark.parametrize("temperature", ["0", "-1"])
def test_fb_l18_training_needs_a_positive_temperature(parse, temperature):
    with pytest.raises(UserError, match=r"--rollout-temperature .*: must be above 0"):
        parse("--rollout-temperature", temperature)
    assert parse("--eval-temperature", "0").eval_temperature == 0


@pytest.mark.parametrize("bound", ["1", "0.5"])
def test_fb_l09_dual_clip_bounds_up_to_one_are_refused(parse, bound):
    with pytest.raises(UserError, match=r"--eps-clip-c .*: must be above 1"):
        parse("--eps-clip-c", bound)


class TestEstimatorOfYourOwn:
    def test_a_dotted_path_and_a_file_are_accepted(self, parse, tmp_path):
        (tmp_path / "own.py").write_text("def estimate(inputs): ...")
        assert parse("--advantage-estimator", "pkg.own.estimate").advantage_estimator == "pkg.own.estimate"
        given = parse("--advantage-estimator", "own.py:estimate")
        assert given.advantage_estimator == f"{tmp_path}/own.py:estimate"
        assert given.n_samples_per_prompt == 1  # nothing is compared unless the function does it

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("rlo", "one of grpo, .*did you mean rloo"),
            ("nowhere.py:f", "no such file"),
            ("own.py", "name the function too"),
        ],
    )
    def test_anything_else_is_refused(self, parse, tmp_path, name, message):
        (tmp_path / "own.py").write_text("")
        with pytest.raises(UserError, match=message):
            parse("--advantage-estimator", name)


def test_dr_grpo_needs_the_length_that_it_divides_by(parse):
    with pytest.raises(UserError, match="dr_grpo needs --rollout-max-response-len"):
        parse("--advantage-estimator", "dr_grpo")
    parse("--advantage-estimator", "dr_grpo", "--rollout-max-response-len", "8")
    parse("--advantage-estimator", "dr_grpo", "--calculate-per-token-loss")


def test_the_mismatch_alarm_is_loose_where_weights_may_differ(parse):
    args = parse()
    assert args.mismatch_alarm is None
    fit_to_async_loop(args)
    assert args.mismatch_alarm == 0.1
    args = parse("--mismatch-alarm", "0.5")
    fit_to_async_loop(args)
    assert args.mismatch_alarm == 0.5
    with pytest.raises(UserError, match="--mismatch-alarm -1.0: must not be negative"):
        parse("--mismatch-alarm", "-1")
