from slime.rollout.data_source import create_data_source
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample


def test_a_round_returns_the_asked_groups_in_order(engine, make_args):
    args = make_args(engine)
    source = create_data_source(args)
    output = generate_rollout(args, 0, source)
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]]
    sample = output.samples[1][0]
    assert sample.status == Sample.Status.COMPLETED and sample.reward == 1.0
    assert sample.tokens[-3:] == [7, 8, 9] and sample.response_length == 3
    assert sample.token_weight_versions == ["1", "1", "1"]
    assert len(engine.requests) == 4
