import io

from slime.observability.console import Console


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def make_console(num_rounds=10, **options):
    file, clock = io.StringIO(), FakeClock()
    return Console(num_rounds, file=file, clock=clock, **options), file, clock


def snapshot(done=12, total=32, **counters):
    phase = {"done": done, "total": total, "elapsed_s": 4.0, "counters": counters}
    return {"phase": "generate", "phases": {"generate": phase}}


def test_the_line_shows_round_phase_counts_speed_and_reward():
    console, _, clock = make_console()
    console.begin("generate", 3)
    clock.now = 4.0
    line = console.line(snapshot(tokens=400, reward_sum=3.0, rewards=6))
    assert line == "round 4/10  generate  12/32  100 tok/s  reward 0.500  4s"


def test_the_line_does_with_what_it_gets():
    console, _, _ = make_console(num_rounds=None)
    assert console.line({}) == "starting  0s"
    console.begin("generate", 0)
    assert console.line(snapshot(total=None)) == "round 1  generate  12 done  0s"
    console.begin("train")
    assert console.line(snapshot()) == "round 1  train  0s"


def test_without_a_terminal_a_line_comes_every_ten_seconds():
    console, file, clock = make_console()
    console.begin("generate", 0)
    for second in range(1, 36):
        clock.now = float(second)
        console.update(snapshot())
    assert len(file.getvalue().splitlines()) == 3
    assert "\x1b" not in file.getvalue()


def test_on_a_terminal_the_line_is_redrawn_and_taken_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console, file, _ = make_console(is_live=True)
    console.begin("generate", 0)
    console.update(snapshot())
    assert "12/32" in file.getvalue()
    console.stop_live()
    console.say("done")
    assert file.getvalue().rstrip().endswith("done")


def test_a_round_ends_in_one_line_of_the_metrics_that_exist():
    console, file, _ = make_console()
    metrics = {"rollout/raw_reward": 0.5, "perf/rollout_time": 2.04, "eval/aime": 0.25, "eval/aime-truncated_ratio": 1}
    console.round_summary(1, metrics | {"eval/aime/response_len/mean": 3, "eval/aime-pass@1": 1})
    assert file.getvalue() == "round 2/10  reward 0.500  rollout 2.0s  eval/aime 0.250\n"


def test_notes_and_brackets_are_printed_as_they_are():
    console, file, _ = make_console()
    console.start(["--n-samples-per-prompt: 8 [default]"], "/runs/a")
    assert file.getvalue() == "run directory: /runs/a\n  note: --n-samples-per-prompt: 8 [default]\n"
