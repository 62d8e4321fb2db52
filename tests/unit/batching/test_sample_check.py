"""Every sample is checked before training; what is wrong is named with the span it lies in and where that came from."""

import time

import numpy as np
import pytest

from slime.batching.sample_check import check_samples
from slime.utils.types import Sample

ENGINE = {"finish_reason": {"type": "abort"}}


def conversation() -> Sample:
    """Prompt, a turn resumed after an abort under new weights, a tool result, a second turn."""
    sample = Sample(index=7, group_index=2, tokens=[1, 2], metadata={"source_name": "web"})
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -1.0], meta_info={**ENGINE, "weight_version": 3})
    sample.append_response_tokens(tokens=[5], log_probs=[-1.0], meta_info={**ENGINE, "weight_version": 4})
    sample.append_response_tokens(tokens=[6, 7, 8], trainable=False, role="tool", source="chat template")
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0], meta_info={**ENGINE, "weight_version": 4})
    return sample


def test_spans_say_turn_role_source_and_version():
    spans = [tuple(span.values()) for span in conversation().token_spans]
    assert spans == [
        (0, 2, 1, "assistant", "engine", "3"),
        (2, 3, 1, "assistant", "engine", "4"),
        (3, 6, 1, "tool", "chat template", None),
        (6, 7, 2, "assistant", "engine", "4"),
    ]


def test_pieces_of_a_stream_are_one_span():
    sample = Sample(tokens=[1])
    for token in range(5):
        sample.append_response_tokens(
            tokens=[token], log_probs=[-1.0], meta_info={"weight_version": 1}, update_terminal_info=False
        )
    assert [(span["start"], span["end"]) for span in sample.token_spans] == [(0, 5)]
    sample.reset_response()
    assert sample.token_spans == []


def short_mask(sample):
    sample.loss_mask = sample.loss_mask[:4]


def wrong_mask(sample):
    sample.loss_mask[5] = 2


def nan_log_prob(sample):
    sample.rollout_log_probs[2] = float("nan")


def positive_log_prob(sample):
    sample.rollout_log_probs[6] = 0.5


def foreign_token(sample):
    sample.tokens[8] = 300


def foreign_prompt_token(sample):
    sample.tokens[1] = -1


TOOL = (
    r"response tokens \[3:6\), turn 1, role tool, weight version None, from chat template, data source web: ids 6, 7, 8"
)
LAST = r"response tokens \[6:7\), turn 2, role assistant, weight version 4, from engine, data source web"


@pytest.mark.parametrize(
    "damage, what, where",
    [
        (short_mask, r"loss_mask covers response tokens \[0:4\)", TOOL),
        (wrong_mask, r"loss_mask\[5\] is 2", TOOL),
        (
            nan_log_prob,
            "rollout_log_probs is no log-probability: response token 2 has nan",
            r"\[2:3\), turn 1, .*version 4",
        ),
        (positive_log_prob, "response token 6 has 0.5", LAST),
        (foreign_token, r"token id outside \[0, 100\): response token 6 has 300", LAST),
        (foreign_prompt_token, "prompt token 1 has -1", "the prompt"),
    ],
)
def test_what_is_wrong_is_named_with_its_provenance(damage, what, where):
    sample = conversation()
    check_samples([sample], vocab_size=100, uses_log_probs=True)
    damage(sample)
    with pytest.raises(ValueError, match=f"(?s)sample 7.*{what}.*\n  in .*{where}"):
        check_samples([sample], vocab_size=100)


def test_log_probs_are_looked_at_where_they_are_trained():
    sample = conversation()
    nan_log_prob(sample)
    sample.loss_mask[2] = 0
    check_samples([sample])
    nan_log_prob(sample)
    sample.loss_mask[2], sample.remove_sample = 1, True
    check_samples([sample])


def test_tool_text_is_not_trained_with_log_probs_that_nobody_sampled():
    sample = conversation()
    sample.loss_mask = [1] * 7
    check_samples([sample])
    with pytest.raises(ValueError, match=f"(?s)token that the model did not sample.*response token 3.*{TOOL}"):
        check_samples([sample], uses_log_probs=True)


def test_samples_without_records_are_told_from_mask_and_versions():
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[0, 1, 1], rollout_log_probs=[0.0, -1.0, 2.0])
    with pytest.raises(
        ValueError, match=r"response tokens \[1:3\), turn 1, role assistant, .*from not recorded: ids 3, 4"
    ):
        check_samples([sample])
    check_samples([Sample(tokens=[1], response_length=0)])


def test_the_check_is_cheap():
    sample = Sample(tokens=[1] * 8)
    meta_info = {**ENGINE, "weight_version": 1}
    sample.append_response_tokens(tokens=[2] * 8192, log_probs=[-1.0] * 8192, meta_info=meta_info)
    best = min(_seconds(lambda: check_samples([sample], 100, True)) for _ in range(5))
    assert best < 0.05  # about 5 ms for 8192 tokens on a busy machine


def _seconds(function):
    started = time.process_time()
    function()
    return time.process_time() - started


def test_one_wrong_sample_among_good_ones_is_found():
    samples = [conversation(), conversation(), conversation()]
    check_samples(samples, vocab_size=100)
    samples[1].index, samples[1].tokens[-1] = 41, 100
    with pytest.raises(ValueError, match=r"sample 41 .*token id outside \[0, 100\)"):
        check_samples(samples, vocab_size=100)


@pytest.mark.parametrize("make", [lambda ids: ids * 1.0, lambda ids: list(ids * np.float32(1)), list, tuple])
def test_ids_of_any_number_type_are_taken(make):
    sample = Sample(tokens=make(np.arange(5)), response_length=2)
    sample.make_plain()
    check_samples([sample], vocab_size=5)
    with pytest.raises(ValueError, match=r"token id outside \[0, 4\)"):
        check_samples([sample], vocab_size=4)


def test_a_response_without_its_prompt_is_an_error_and_not_another_samples_log_prob():
    sample = Sample(index=3, group_index=1, tokens=[5, 6], response_length=2, rollout_log_probs=[-1.0, -1.0])
    with pytest.raises(ValueError, match=r"sample 3 \(group 1\): tokens has only the 2 tokens of the response"):
        check_samples([sample])
    sample.loss_mask = [0, 1]  # the first one as context
    check_samples([sample])
    sample.loss_mask, sample.remove_sample = None, True
    check_samples([sample])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": [1, 2, 3, 4, 5.5]}, "no whole number: response token 2 has 5.5"),
        ({"tokens": [1, 2, 3, 4, "5"]}, "no whole number: response token 2 has '5'"),
        ({"tokens": [None, 2, 3, 4, 5]}, "no whole number: prompt token 0 has None"),
        ({"tokens": [1, 2, 3, 4, 2**70]}, "token id outside .*response token 2 has 1180591620717411303424"),
        ({"rollout_log_probs": [-1.0, None, -1.0]}, "rollout_log_probs that is no number: response token 1 has None"),
        ({"rollout_log_probs": [[-1.0], [-1.0], [-1.0]]}, r"no number: response token 0 has \[-1.0\]"),
        ({"teacher_log_probs": [-1.0, -1.0, "x"]}, "teacher_log_probs that is no number: response token 2 has 'x'"),
        ({"response_length": 3.0}, "response_length 3.0 is no whole number"),
        ({"response_length": None}, "response_length None is no whole number"),
        ({"loss_mask": [0.5, 0, 1]}, r"loss_mask\[0\] is 0.5"),
    ],
)
def test_what_is_no_token_or_log_prob_is_named(changes, message):
    sample = Sample(index=7, tokens=[1, 2], loss_mask=None)
    sample.append_response_tokens(tokens=[3, 4, 5], log_probs=[-1.0] * 3, meta_info=ENGINE)
    for name, value in changes.items():
        setattr(sample, name, value)
    with pytest.raises(ValueError, match=f"sample 7.*{message}"):
        check_samples([sample], vocab_size=100)
