import pickle
import threading

from slime.observability.progress import Progress


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def test_counts_are_exact_when_many_threads_add():
    progress = Progress()
    progress.set_total("generate", 4000)

    def work():
        for _ in range(500):
            progress.add("generate", tokens=3)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    phase = progress.snapshot()["phases"]["generate"]
    assert (phase["done"], phase["total"], phase["counters"]) == (4000, 4000, {"tokens": 12000})


def test_set_total_forgets_the_earlier_round():
    progress = Progress()
    progress.set_total("generate", 8)
    progress.add("generate", 8, tokens=100)
    progress.set_total("generate", 4)
    assert progress.snapshot()["phases"]["generate"]["done"] == 0
    assert progress.snapshot()["phases"]["generate"]["counters"] == {}


def test_elapsed_time_stands_still_once_the_phase_is_done():
    clock = FakeClock()
    progress = Progress(clock)
    progress.set_total("generate", 1)
    clock.now = 5.0
    assert progress.snapshot()["phases"]["generate"]["elapsed_s"] == 5.0
    progress.add("generate")
    clock.now = 50.0
    assert progress.snapshot()["phases"]["generate"]["elapsed_s"] == 5.0


def test_a_phase_without_a_total_counts_up():
    progress = Progress()
    progress.add("eval", 2)
    assert progress.snapshot()["phase"] == "eval"
    assert progress.snapshot()["phases"]["eval"]["total"] is None


def test_an_untouched_progress_has_an_empty_snapshot():
    assert Progress().snapshot() == {"phase": None, "phases": {}}


def test_a_snapshot_does_not_change_afterwards():
    progress = Progress()
    progress.add("generate", tokens=1)
    snapshot = progress.snapshot()
    progress.add("generate", tokens=1)
    assert snapshot["phases"]["generate"]["counters"] == {"tokens": 1}


def test_progress_survives_pickling():
    progress = Progress()
    progress.add("generate", 3)
    copy = pickle.loads(pickle.dumps(progress))
    copy.add("generate")
    assert copy.snapshot()["phases"]["generate"]["done"] == 4
