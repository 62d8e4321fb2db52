"""The warning about trainer and engine names numbers and causes, comes once, and again only after many rounds."""

from slime.observability.mismatch_alarm import REPEAT, MismatchAlarm

ROUND = {
    "rollout/train_rollout_alarm": 1.0,
    "rollout/train_rollout_logprob_abs_diff": 0.25,
    "rollout/train_rollout_logprob_abs_diff_max": 4.0,
    "rollout/train_rollout_ess": 0.4,
}


def test_warning_names_the_numbers_and_likely_causes():
    text = MismatchAlarm().text(7, ROUND)
    for part in (
        "round 7",
        "0.25",
        "largest 4",
        "40%",
        "--check-weight-update-equal",
        "--rollout-top-p",
        "--mismatch-alarm",
    ):
        assert part in text


def test_quiet_rounds_say_nothing():
    alarm = MismatchAlarm()
    assert alarm.text(0, {}) is None
    assert alarm.text(0, {**ROUND, "rollout/train_rollout_alarm": 0.0}) is None


def test_warning_comes_again_after_many_alarming_rounds():
    alarm = MismatchAlarm()
    said = [i for i in range(2 * REPEAT + 1) if alarm.text(i, ROUND) is not None]
    assert said == [0, REPEAT, 2 * REPEAT]
