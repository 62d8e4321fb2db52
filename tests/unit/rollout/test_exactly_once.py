"""FB-A02 and FB-A03: whatever is killed when, each prompt of an epoch has exactly one fate."""

import random
from collections import Counter

import pytest
import torch
from fake_engine import reply

from slime.rollout.base_types import leaves_of
from slime.rollout.data_source import create_data_source
from slime.rollout.ledger_check import check
from slime.rollout.sglang_rollout import generate_rollout


def check_ledger(source):
    """It adds up, by our own check and by counting: ended + open = served, for every row."""
    assert check(source.state_dict()).problems == []
    found = Counter({row: sum(outcomes.values()) for row, outcomes in source.ledger.per_row().items()})
    found.update(entry["row"] for entry in source.ledger.in_flight.values())
    found.update(leaves_of(group)[0].data_row for group in source.buffer + source._requeued)
    served = Counter(dict.fromkeys(range(len(source)), source.epoch_id))
    served.update(source._order[: source.sample_offset])
    assert found == +served


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fb_a02_random_kills_with_filter_over_sampling_and_partial_rollout(
    engine, make_args, write_rows, tmp_path, seed, partial
):
    rng = random.Random(seed)
    engine.answer = lambda payload: reply([7], "a") if rng.random() < 0.8 else 0.02
    rows = 7
    args = make_args(
        engine,
        prompt_data=write_rows([{"input": f"p{i}"} for i in range(rows)]),
        rollout_shuffle=True,
        over_sampling_batch_size=4,
        partial_rollout=partial,
        dynamic_sampling_filter_path="stub_rm.drop_a_third",
    )
    checkpoint, next_round, trained = None, 0, Counter()
    while next_round < 8:
        source = create_data_source(args)  # a new process
        if checkpoint is not None:
            source.load_state_dict(torch.load(tmp_path / checkpoint, weights_only=True))
            check_ledger(source)
        for rollout_id in range(next_round, next_round + rng.randint(1, 3)):
            groups = generate_rollout(args, rollout_id, source).samples
            if rng.random() < 0.4:
                break  # killed before the round was trained and saved
            source.mark_finished(groups)
            check_ledger(source)
            trained.update(group[0].data_row for group in groups)
            checkpoint, next_round = f"{rollout_id}.pt", rollout_id + 1
            torch.save(source.state_dict(), tmp_path / checkpoint)
    assert sum(trained.values()) == 2 * next_round == source_total(tmp_path / checkpoint)


def source_total(path):
    return torch.load(path, weights_only=True)["ledger"]["outcomes"]["trained"]


def test_resumed_and_uninterrupted_runs_train_the_same_prompts(engine, make_args, write_rows, tmp_path):
    engine.answer = lambda payload: reply([7], "a")
    args = make_args(engine, prompt_data=write_rows([{"input": f"p{i}"} for i in range(5)]), rollout_shuffle=True)

    def rounds(source, numbers):
        found = []
        for rollout_id in numbers:
            groups = generate_rollout(args, rollout_id, source).samples
            source.mark_finished(groups)
            found.append([(s.index, s.prompt) for group in groups for s in group])
        return found

    expected = rounds(create_data_source(args), range(6))
    first = create_data_source(args)
    begun = rounds(first, range(3))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = create_data_source(args)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert begun + rounds(second, range(3, 6)) == expected
