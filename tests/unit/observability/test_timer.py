import pytest

from slime.observability.timer import Timer, Timers, inverse_timer, step_time_metrics, timer


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def test_seconds_of_a_name_add_up_until_they_are_reported():
    clock = FakeClock()
    timers = Timers(clock)
    for seconds in (1.0, 2.0):
        with timers("train"):
            clock.now += seconds
    assert timers.seconds("train") == 3.0
    assert timers.pop_metrics() == {"perf/train_time": 3.0}
    assert timers.pop_metrics() == {}


def test_a_block_that_raises_is_timed_and_can_run_again():
    clock = FakeClock()
    timers = Timers(clock)
    with pytest.raises(KeyError), timers("save_model"):
        clock.now += 1
        raise KeyError
    with timers("save_model"):
        clock.now += 1
    assert timers.pop_metrics() == {"perf/save_model_time": 2.0}


def test_a_running_timer_goes_on_over_a_report():
    clock = FakeClock()
    timers = Timers(clock)
    timers.start("train_wait")
    clock.now = 4.0
    assert timers.pop_metrics() == {}
    timers.stop("train_wait")
    assert timers.pop_metrics() == {"perf/train_wait_time": 4.0}


def test_misuse_is_an_assertion():
    timers = Timers()
    with pytest.raises(AssertionError, match="never started"):
        timers.stop("x")
    timers.start("x")
    with pytest.raises(AssertionError, match="already running"):
        timers.start("x")


def test_step_time_is_waiting_plus_training():
    assert step_time_metrics(1.0, 3.0) == {
        "perf/train_wait_time": 1.0,
        "perf/step_time": 4.0,
        "perf/wait_time_ratio": 0.25,
    }
    assert step_time_metrics(0.0, 0.0)["perf/wait_time_ratio"] == 0.0


def test_users_functions_time_themselves_and_it_is_reported_with_what_they_log():
    from slime.observability.logging_utils import take_logged

    @timer
    def judge():
        return 3

    @timer("tool")
    def call():
        return judge()

    with timer("tool"):
        assert call() == 3
    Timer().start("own")
    with inverse_timer("own"):
        assert "own" not in Timer()._started
    Timer().end("own")
    assert set(take_logged()) == {"perf/judge_time", "perf/tool_time", "perf/own_time"} and take_logged() == {}
