"""What users' filters and classes may do to the Data Buffer, and other flags in a continued run: no prompt twice, none lost."""

import json

import pytest
import torch

from slime.rollout import data_state, ledger_command
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.data_source_adapter import adapt_class
from slime.rollout.ledger_check import check
from slime.rollout.round_policy import age_of
from slime.utils import data
from slime.utils.types import Sample


@pytest.fixture
def args(make_args, write_rows):
    def make(rows=6, **overrides):
        return make_args(prompt_data=write_rows([{"input": f"p{i}", "label": i} for i in range(rows)]), **overrides)

    return make


def resumed(source, arguments, tmp_path):
    torch.save(source.state_dict(), tmp_path / "state.pt")
    found = RolloutDataSourceWithBuffer(arguments)
    found.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    return found


def finish(sample, ids):
    sample.tokens = [1]
    sample.append_response_tokens(
        tokens=ids, log_probs=[-1.0] * len(ids), meta_info={"finish_reason": {"type": "stop"}}
    )


# ---- buffer filters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "return [list(group) for group in buffer[:num_samples]]",
            "left 2 of the groups that it returned in the buffer",
        ),
        ("return copy.deepcopy(buffer[:num_samples])", "left 2 of the groups"),
        ("return [buffer[0], buffer.pop(0)]", "returned a group twice"),
        ("return [buffer.pop(0)[:1]]", "returned 1 of the 2 samples of group 0"),
        (
            "return [[a, b] for a, b in zip(buffer.pop(0), buffer.pop(0))]",
            r"the group_index \[0, 1\], which is none of",
        ),
        ("return [[Sample(prompt='mine')] * 2]", "group_index None, which is none of the buffer's groups"),
    ],
)
def test_a_buffer_filter_that_would_train_prompts_twice_or_lose_them_is_named(args, tmp_path, body, message):
    lines = ["import copy", "from slime.utils.types import Sample", "", ""]
    lines += ["def buffer_filter(args, rollout_id, buffer, num_samples):", f"    {body}", ""]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    source = RolloutDataSourceWithBuffer(args(buffer_filter_path=str(tmp_path / "mine.py")))
    source.add_samples(source.get_samples(3))
    with pytest.raises(ValueError, match=f"--buffer-filter-path .*mine.py .*{message}"):
        source.get_samples(2)


def test_a_buffer_filter_may_return_copies_of_what_it_took_out(args, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import copy\n\n\ndef buffer_filter(args, rollout_id, buffer, num_samples):\n"
        "    return [copy.deepcopy(buffer.pop(0)) for _ in range(num_samples)]\n"
    )
    source = RolloutDataSourceWithBuffer(args(buffer_filter_path=str(tmp_path / "mine.py")))
    source.add_samples(source.get_samples(3))
    source.mark_finished(source.get_samples(2))
    assert source.stats()["trained"] == 2 and check(source.state_dict()).problems == []


# ---- users' classes ------------------------------------------------------------------------------------------------


def numbered(**numbers):
    return [Sample(prompt="a", **numbers), Sample(prompt="a", **numbers)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbered(group_index=0),  # the number of a row, of an epoch that begins again, ...
        lambda: [Sample(prompt="a", group_index=0), Sample(prompt="a", group_index=None)],
        lambda: numbered(group_index=3, index=7),
        lambda: Sample(prompt="a", index=5),
    ],
)
def test_groups_of_a_user_class_get_numbers_of_their_own_where_those_given_are_taken(args, make):
    class Source:
        def get_samples(self, num_samples):
            return [make() for _ in range(num_samples)]

    source = adapt_class(args(), Source)
    groups = source.get_samples(2) + source.get_samples(1)
    assert len({group[0].group_index for group in groups}) == 3
    for group in groups:
        assert group[0].group_index == group[1].group_index
        assert group[0].index != group[1].index  # or both would sample the same response
    source.mark_delivered(groups, 0)
    source.mark_finished(groups)
    assert source.stats()["trained"] == 3 and check(source.state_dict()).problems == []


def test_numbers_that_a_user_class_gives_are_kept_where_they_are_free(args):
    class Source:
        def get_samples(self, num_samples):
            return [[Sample(group_index=0, index=40), Sample(group_index=0, index=41)]]

    source = adapt_class(args(), Source)
    for _ in range(2):  # once more when the first has ended, as of a next epoch
        (group,) = source.get_samples(1)
        assert [(sample.group_index, sample.index) for sample in group] == [(0, 40), (0, 41)]
        source.mark_finished([group])
    assert source.stats()["trained"] == 2


def test_a_user_class_that_numbers_from_the_beginning_after_a_restart_takes_no_number_that_waits(args):
    class Source:
        given = 0

        def get_samples(self, num_samples):
            self.given += num_samples
            return [numbered(group_index=self.given - num_samples + i) for i in range(num_samples)]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    source = adapt_class(args(), Source)
    source.get_samples(2)
    again = adapt_class(args(), Source)
    again.load_state_dict(source.state_dict())
    groups = again.get_samples(1) + again.get_samples(3)
    assert len({group[0].group_index for group in groups}) == 4
    again.mark_finished(groups)
    assert again.stats()["trained"] == 4 and check(again.state_dict()).problems == []


@pytest.mark.parametrize(
    "make, message",
    [(lambda sample: [sample, sample], "returned a sample twice"), (lambda sample: [], "returned an empty group")],
)
def test_groups_that_are_none_are_named(args, make, message):
    class Source:
        def get_samples(self, num_samples):
            return [make(Sample(prompt="a"))]

    with pytest.raises(ValueError, match=f"--data-source-path .*get_samples {message}"):
        adapt_class(args(), Source).get_samples(1)


def test_a_group_kept_for_long_is_as_old_as_the_round_that_trained_it_also_after_a_restart(args, tmp_path):
    source = RolloutDataSourceWithBuffer(args())
    kept, other = source.get_samples(2)
    finish(kept[0], [3]), finish(kept[1], [4])
    source.mark_delivered([kept, other], 4)
    source.mark_finished([kept, other])
    again = resumed(source, args(), tmp_path)
    again.add_samples([kept])
    (group,) = again.get_samples(1)
    assert age_of(group, 9) == 5


# ---- continued with other flags ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_samples_per_prompt_starts_unfinished_groups_again(args, tmp_path, caplog, size):
    source = RolloutDataSourceWithBuffer(args())
    in_flight, partial, done = source.get_samples(3)
    partial[0].tokens = [1]
    partial[0].append_response_tokens(
        tokens=[3], log_probs=[-1.0], meta_info={"finish_reason": {"type": "abort"}, "weight_version": "4"}
    )
    finish(done[0], [5]), finish(done[1], [6])
    source.mark_delivered([done], 0)
    source.add_samples([partial, done])
    source.mark_finished([done])
    again = resumed(source, args(n_samples_per_prompt=size), tmp_path)
    assert "--n-samples-per-prompt was 2 in the checkpoint" in caplog.text
    groups = again.get_samples(3)
    assert [group[0].prompt for group in groups] == ["p1", "p0", "p3"]  # the buffer first
    assert [group[0].group_index for group in groups][:2] == [1, 0]
    indices = [sample.index for group in groups for sample in group]
    assert len(indices) == len(set(indices)) == 3 * size and min(indices) >= 8  # new ones: 0 to 7 were given before
    restarted = groups[0][0]
    assert (restarted.status, restarted.response_length, restarted.tokens) == (Sample.Status.PENDING, 0, [1])
    again.mark_finished(groups)
    assert again.stats()["trained"] == 4 and again.stats()["buffered"] == 0
    assert check(again.state_dict()).problems == []


def test_another_number_of_samples_takes_groups_that_a_subclass_put_into_the_buffer_itself(args, tmp_path):
    source = RolloutDataSourceWithBuffer(args())
    source.buffer.append([Sample(prompt="mine"), Sample(prompt="mine")])
    again = resumed(source, args(n_samples_per_prompt=3), tmp_path)
    assert [sample.prompt for sample in again.get_samples(1)[0]] == ["mine"] * 3


@pytest.mark.parametrize("partial", [True, False])
def test_fb_t08_partials_of_a_checkpoint_are_continued_only_with_partial_rollout(args, tmp_path, partial):
    source = RolloutDataSourceWithBuffer(args(partial_rollout=True))
    cut, done = source.get_samples(2)
    cut[0].tokens = [1]
    cut[0].append_response_tokens(tokens=[3], log_probs=[-1.0], meta_info={"finish_reason": {"type": "abort"}})
    finish(cut[1], [4]), finish(done[0], [5]), finish(done[1], [6])
    source.add_samples([cut, done])
    source.get_samples(1)  # in flight again at the checkpoint
    again = resumed(source, args(partial_rollout=partial), tmp_path)
    lengths = {group[0].prompt: [sample.response_length for sample in group] for group in again.get_samples(2)}
    assert lengths == {"p0": [1, 1] if partial else [0, 0], "p1": [1, 1]}


def test_what_a_user_class_gave_its_samples_is_there_again_after_a_restart(args):
    class Source:
        def get_samples(self, num_samples):
            return [[Sample(prompt="p", tokens=[1, 2], response="known", response_length=1, reward=0.5)]]

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            self.get_samples = lambda num_samples: []

    source, again = adapt_class(args(), Source), adapt_class(args(), Source)
    source.get_samples(1)
    again.load_state_dict(source.state_dict())
    sample = again.get_samples(1)[0][0]
    assert (sample.response, sample.response_length, sample.tokens, sample.reward) == ("known", 1, [1, 2], 0.5)


def test_other_prompts_of_the_same_number_are_said(args, make_args, write_rows, tmp_path, caplog):
    source = RolloutDataSourceWithBuffer(args())
    source.get_samples(2)
    resumed(source, args(), tmp_path)
    assert not caplog.text
    other = write_rows([{"input": f"q{i}", "label": i} for i in range(6)], "other.jsonl")
    resumed(source, make_args(prompt_data=other), tmp_path)
    assert "other.jsonl does not hold the prompts or labels that the checkpoint was written with" in caplog.text


def test_a_chat_template_that_says_the_day_makes_no_other_prompts_of_the_same_rows(
    make_args, write_rows, tmp_path, caplog, monkeypatch
):
    args = make_args(
        prompt_data=write_rows([{"input": f"p{i}", "label": i} for i in range(4)]), apply_chat_template=True
    )
    today = "26 Jul"
    monkeypatch.setattr(data, "render_chat", lambda tokenizer, messages, *_: f"{today}: {messages[0]['content']}")
    source = RolloutDataSourceWithBuffer(args)
    assert source.get_samples(1)[0][0].prompt == "26 Jul: p0"
    today = "27 Jul"
    assert resumed(source, args, tmp_path).dataset[1].prompt == "27 Jul: p1" and not caplog.text
    write_rows([{"input": f"p{i}", "label": 9} for i in range(4)])
    resumed(source, args, tmp_path)
    assert "does not hold the prompts or labels" in caplog.text


@pytest.mark.parametrize("change", ["slice", "first row"])
def test_a_stream_goes_on_only_in_the_same_rows(make_args, write_rows, tmp_path, change):
    path = write_rows([{"input": f"p{i}"} for i in range(8)])
    source = RolloutDataSourceWithBuffer(make_args(prompt_data=f"{path}@[0:4]", streaming_data=True))
    source.mark_finished(source.get_samples(2))
    same = resumed(source, make_args(prompt_data=f"{path}@[0:4]", streaming_data=True), tmp_path)
    assert same.get_samples(1)[0][0].prompt == "p2"
    part = "@[4:8]" if change == "slice" else "@[0:4]"
    if change == "first row":
        write_rows([{"input": f"{json.dumps(i)}"} for i in range(8)])
    with pytest.raises(ValueError, match="another slice or another first row.*--no-resume"):
        resumed(source, make_args(prompt_data=path + part, streaming_data=True), tmp_path)


def test_a_source_without_a_buffer_hands_out_what_waited_in_one(args, tmp_path):
    source = RolloutDataSourceWithBuffer(args())
    source.add_samples(source.get_samples(3)[1:])
    plain = RolloutDataSource(args())
    plain.load_state_dict(source.state_dict())
    groups = plain.get_samples(4)
    assert [group[0].prompt for group in groups] == ["p0", "p1", "p2", "p3"]
    plain.mark_finished(groups)
    assert check(plain.state_dict()).problems == []


def test_a_data_source_of_another_kind_is_named(args, tmp_path):
    class Source:
        def get_samples(self, num_samples):
            return ["a"] * num_samples

    arguments = args(data_source_path="mine.Source")
    ours, theirs = RolloutDataSource(args()), adapt_class(arguments, Source)
    for first, second in ((ours, theirs), (theirs, ours)):
        data_state.save(arguments, first, str(tmp_path), 0)
        with pytest.raises(ValueError, match="another kind .* than --data-source-path mine.Source"):
            data_state.load(arguments, second, str(tmp_path), 0)


def test_a_ledger_of_a_damaged_or_foreign_file_is_an_error_that_names_it(args, tmp_path):
    state = RolloutDataSourceWithBuffer(args()).state_dict()
    torch.save(state, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:1000])
    with pytest.raises(ValueError, match="cut.pt cannot be read; it is damaged or no Data Buffer"):
        ledger_command.run(str(tmp_path / "cut.pt"))
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(
        ValueError, match="data.jsonl cannot be read; it is damaged or no Data Buffer: UnpicklingError$"
    ):
        ledger_command.run(str(tmp_path / "data.jsonl"))
    del state["ledger"]
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt holds no ledger as a Data Buffer writes it: KeyError: 'ledger'"):
        ledger_command.run(str(tmp_path / "other.pt"))
