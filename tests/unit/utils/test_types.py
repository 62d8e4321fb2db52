import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch

from slime.utils.types import PrefixCacheInfo, Sample, SpecInfo


class Args:
    sglang_speculative_algorithm = None
    num_layers = 2
    moe_router_topk = 2


ARGS = Args()


def meta(finish="stop", **more):
    return {"finish_reason": {"type": finish}, **more}


def started(prompt=(1, 2)):
    return Sample(index=3, tokens=list(prompt))


def test_import_is_cheap():
    code = "import sys, slime.utils.types; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("kind", list(Sample.Status))
def test_round_trip_keeps_every_field_and_extra_attributes(kind):
    sample = Sample(index=1, group_index=0, prompt=[{"role": "user", "content": "x"}], status=kind, metadata={"a": 1})
    sample.spec_info = SpecInfo(1, 2, 3, 4)
    sample.prefix_cache_info = PrefixCacheInfo(5, 6)
    sample.trace = {"version": 1}
    data = sample.to_dict()
    before = copy.deepcopy(data)
    assert Sample.from_dict(data).to_dict() == before == data
    assert data["status"] == kind.value and data["spec_info"]["completion_token_num"] == 4


def test_round_trip_of_an_empty_sample_and_of_old_dumps():
    assert Sample.from_dict(Sample().to_dict()) == Sample()
    assert Sample.from_dict({"status": "failed"}).spec_info == SpecInfo()


def test_append_keeps_everything_aligned():
    sample = started()
    sample.append_response_tokens(
        ARGS, tokens=[3, 4], log_probs=[-1.0, -2.0], text="ab", meta_info=meta("length", weight_version="7")
    )
    sample.append_response_tokens(ARGS, tokens=[5], trainable=False, text="tool")
    sample.append_response_tokens(
        ARGS, tokens=torch.tensor([[6]]), log_probs=torch.tensor([-3.0]), meta_info=meta("stop", weight_version=8)
    )
    assert sample.tokens == [1, 2, 3, 4, 5, 6] and sample.response == "abtool"
    assert sample.loss_mask == [1, 1, 0, 1] and sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0]
    assert sample.weight_versions == ["7", "8"] and sample.token_weight_versions == ["7", "7", None, "8"]
    assert sample.status == Sample.Status.COMPLETED and sample.effective_response_length == 3


def test_append_rejects_what_cannot_be_aligned():
    with pytest.raises(ValueError, match="2 trainable tokens without log_probs"):
        started().append_response_tokens(tokens=[1, 2])
    with pytest.raises(ValueError, match="not trainable"):
        started().append_response_tokens(tokens=[1], log_probs=[0.0], trainable=False)
    with pytest.raises(ValueError, match="1 log_probs for 2 tokens"):
        started().append_response_tokens(tokens=[1, 2], log_probs=[0.0])
    text_only = Sample(tokens=[1, 2, 3], response_length=1)
    with pytest.raises(ValueError, match=r"response tokens \[0:1\) have no rollout_log_probs"):
        text_only.append_response_tokens(tokens=[4], log_probs=[0.0])


def test_context_after_a_text_only_response_pads_log_probs():
    sample = Sample(tokens=[1, 2, 3], response_length=1)
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert sample.rollout_log_probs == [0.0, 0.0] and sample.loss_mask == [1, 0]


def test_fb_t06_continuation_after_an_abort_extends_mask_and_versions():
    sample = started()
    sample.append_response_tokens(
        ARGS, tokens=[3, 4, 5], log_probs=[-1.0] * 3, meta_info=meta("abort", weight_version=1)
    )
    sample.loss_mask = [0] * sample.response_length
    sample.append_response_tokens(ARGS, tokens=[6, 7], log_probs=[-1.0] * 2, meta_info=meta("stop", weight_version=2))
    assert sample.loss_mask == [0, 0, 0, 1, 1]
    assert sample.token_weight_versions == ["1", "1", "1", "2", "2"]


def test_fb_t09_a_reply_without_weight_version_still_has_one_token_version_each():
    sample = started()
    sample.append_response_tokens(ARGS, tokens=[3], log_probs=[-1.0], meta_info=meta("abort"))
    assert sample.status == Sample.Status.ABORTED and sample.weight_versions == []
    assert sample.token_weight_versions == [None]


def test_tokens_that_a_users_function_adds_or_cuts_itself_have_no_version_and_are_no_fault():
    sample = started()
    sample.append_response_tokens(ARGS, tokens=[3, 4], log_probs=[-1.0] * 2, meta_info=meta(weight_version=1))
    sample.tokens, sample.response_length = sample.tokens + [8, 9], 4
    sample.loss_mask, sample.rollout_log_probs = [1, 1, 0, 0], [-1.0, -1.0, 0.0, 0.0]
    sample.check_invariants()
    sample.append_response_tokens(ARGS, tokens=[5], log_probs=[-1.0], meta_info=meta("stop", weight_version=2))
    assert sample.token_weight_versions == ["1", "1", None, None, "2"]


def test_versions_of_a_call_that_spans_a_weight_update():
    spans = [{"version": "10", "start": 0, "end": 2}, {"version": "11", "start": 2, "end": 3}]
    sample = started()
    sample.append_response_tokens(
        ARGS, tokens=[3, 4, 5], log_probs=[0.0] * 3, meta_info=meta(weight_version="11", weight_versions=spans)
    )
    assert sample.token_weight_versions == ["10", "10", "11"] and sample.weight_versions == ["11"]


def test_non_final_chunks_leave_the_status_alone():
    sample = started()
    sample.append_response_tokens(
        ARGS, tokens=[3], log_probs=[0.0], meta_info=meta("stop", weight_version="1"), update_terminal_info=False
    )
    assert sample.status == Sample.Status.PENDING and sample.weight_versions == []


def test_unknown_finish_reason_leaves_the_status_alone():
    sample = started()
    sample.append_response_tokens(ARGS, tokens=[3], log_probs=[0.0], meta_info=meta("content_filter"))
    assert sample.status == Sample.Status.PENDING


def test_top_p_offsets_are_shifted_behind_the_old_ones():
    sample = started()
    sample.append_response_tokens(
        ARGS, tokens=[3], log_probs=[0.0], meta_info={"top_p_token_ids": [1], "top_p_token_offsets": [0, 1]}
    )
    sample.append_response_tokens(
        ARGS,
        tokens=[4, 5],
        log_probs=[0.0] * 2,
        meta_info={"top_p_kept_token_ids": [10, 11, 20], "top_p_kept_token_offsets": [0, 2, 3]},
    )
    assert sample.rollout_top_p_token_ids.tolist() == [1, 10, 11, 20]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3, 4]
    sample.append_response_tokens(ARGS, tokens=[6], trainable=False)
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3, 4, 4]


@pytest.mark.parametrize(
    "info, message",
    [
        ({"top_p_token_ids": [1]}, "both"),
        ({"top_p_token_ids": [1], "top_p_token_offsets": [0, 1, 1]}, "3 offsets for 1"),
        ({"top_p_token_ids": [1], "top_p_token_offsets": [1, 1]}, "from 0 to the number of kept ids, 1"),
    ],
)
def test_broken_top_p_data_is_named(info, message):
    with pytest.raises(ValueError, match=message):
        started().append_response_tokens(ARGS, tokens=[3], log_probs=[0.0], meta_info=info)


def test_top_p_offsets_that_fall_are_named():
    falling = {"top_p_token_ids": [1, 5, 7], "top_p_token_offsets": [0, 3, 1, 3]}
    with pytest.raises(ValueError, match="sample .*must rise from 0"):
        started().append_response_tokens(ARGS, tokens=[3, 4, 5], log_probs=[0.0] * 3, meta_info=falling)


def test_routed_experts_replace_and_continue():
    import base64

    import numpy as np

    sample = started()
    first = np.arange(8, dtype="<i4")  # 2 rows x 2 layers x top 2
    sample.append_response_tokens(
        ARGS, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": base64.b64encode(first.tobytes()).decode()}
    )
    assert sample.rollout_routed_experts.shape == (2, 2, 2)
    sample.append_response_tokens(
        ARGS, tokens=[4], log_probs=[0.0], meta_info={"routed_experts": list(range(4)), "routed_experts_start_len": 2}
    )
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == [0, 4, 0]
    with pytest.raises(ValueError, match="expected 4 x 2 layers"):
        sample.append_response_tokens(ARGS, tokens=[5], log_probs=[0.0], meta_info={"routed_experts": [1]})


def test_routed_experts_with_a_gap_are_refused():
    with pytest.raises(ValueError, match=r"rows \[0:1\) were never received"):
        started().append_response_tokens(
            ARGS, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": [0] * 4, "routed_experts_start_len": 1}
        )


def test_check_invariants_names_the_span():
    sample = Sample(index=9, tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1])
    with pytest.raises(ValueError, match=r"sample 9: loss_mask covers response tokens \[0:1\), \[1:3\) are missing"):
        sample.check_invariants()
    sample.loss_mask = [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"\[3:4\) beyond"):
        sample.check_invariants()
    with pytest.raises(ValueError, match="no room"):
        Sample(tokens=[1], response_length=2).check_invariants()


def test_rewards_by_key_and_reset():
    class Keyed:
        reward_key = "acc"

    sample = started()
    sample.append_response_tokens(ARGS, tokens=[3], log_probs=[0.0], text="x", meta_info=meta(weight_version="1"))
    sample.reward = {"acc": 0.5}
    assert sample.get_reward_value(Keyed) == 0.5
    sample.metadata |= {"reward_error": "no reward", "tokens_from_text": 1}  # of this response, not of the next
    sample.reset_response()
    assert sample == Sample(index=3, tokens=[1, 2])


def test_counters_accumulate_over_calls():
    sample = started()
    ARGS_SPEC = type("A", (), {"sglang_speculative_algorithm": "EAGLE"})
    for _ in range(2):
        sample.append_response_tokens(
            ARGS_SPEC,
            tokens=[3],
            log_probs=[0.0],
            meta_info=meta(
                spec_accept_token_num=1,
                spec_draft_token_num=4,
                spec_verify_ct=1,
                completion_tokens=2,
                cached_tokens=3,
                prompt_tokens=4,
            ),
        )
    assert sample.spec_info.spec_accept_rate == 0.25 and sample.spec_info.spec_accept_length == 2.0
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.75
    assert Sample().spec_info.spec_accept_rate == 0.0 == Sample().prefix_cache_info.prefix_cache_hit_rate


def test_duplicate_equals_deepcopy_and_shares_nothing_mutable():
    import copy

    sample = Sample(index=3, prompt=[{"role": "user", "content": "hi"}], label={"a": [1]}, metadata={"k": [1]})
    sample.extra = {"mine": [1]}
    sample.spec_info.spec_verify_ct = 2
    twin = sample.duplicate()
    assert twin == copy.deepcopy(sample) and vars(twin) == vars(copy.deepcopy(sample))
    for name, value in vars(sample).items():
        if isinstance(value, (list, dict)) or name.endswith("_info"):
            assert getattr(twin, name) is not value, name
    twin.metadata["k"].append(2)
    twin.extra["mine"].append(2)
    twin.prompt[0]["content"] = "bye"
    assert sample.metadata == {"k": [1]} and sample.extra == {"mine": [1]} and sample.prompt[0]["content"] == "hi"


def test_a_status_may_be_given_by_its_word():
    sample = Sample(status="truncated")
    assert sample.status is Sample.Status.TRUNCATED
    sample.status = "aborted"
    assert sample.status is Sample.Status.ABORTED and sample.to_dict()["status"] == "aborted"
    with pytest.raises(ValueError, match="'done' is no status of a sample; expected one of pending, completed"):
        sample.status = "done"


def test_setting_a_field_of_a_sample_costs_no_call_but_for_the_status():
    assert Sample.__setattr__ is object.__setattr__  # millions of rows become samples at the start of a run
    sample = pickle.loads(pickle.dumps(Sample(status="failed")))
    assert sample.status is sample.duplicate().status is dataclasses.replace(sample).status is Sample.Status.FAILED
