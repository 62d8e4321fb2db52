import types
import zlib

import pytest

from slime.observability.metric_utils import has_repetition
from slime.observability.rollout_metrics import compute_eval_metrics, compute_rollout_metrics, sample_metrics
from slime.utils.types import Sample


def make_args(**changes):
    fields = {
        "advantage_estimator": "grpo",
        "reward_key": None,
        "eval_reward_key": None,
        "sglang_speculative_algorithm": None,
        "log_reward_category": None,
        "log_passrate": False,
        "debug_rollout_only": False,
        "log_multi_turn": False,
        "log_correct_samples": False,
        "rollout_num_gpus": 2,
        "rollout_max_response_len": 10,
        "n_samples_per_eval_prompt": 1,
        "eval_datasets": [],
    }
    return types.SimpleNamespace(**fields | changes)


def make_sample(reward=None, length=4, *, status="completed", **fields):
    sample = Sample(reward=reward, response_length=length, tokens=list(range(length)), status=Sample.Status(status))
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def with_prefix(metrics, prefix):
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


def test_response_length_counts_trained_tokens_only():
    samples = [make_sample(1.0, 4, loss_mask=[1, 0, 0, 1]), make_sample(0.0, 6)]
    metrics = compute_rollout_metrics(make_args(), samples, 1.0)
    assert with_prefix(metrics, "rollout/response_len") == {
        "rollout/response_len/mean": 4,
        "rollout/response_len/median": 4,
        "rollout/response_len/max": 6,
        "rollout/response_len/min": 2,
    }


def test_trained_tokens_are_those_of_samples_that_were_not_removed():
    samples = [
        make_sample(1.0, 4, loss_mask=[1, 0, 0, 1]),
        make_sample(0.0, 6),
        make_sample(0.0, 5, remove_sample=True),
    ]
    assert compute_rollout_metrics(make_args(), samples, 1.0)["rollout/trained_tokens"] == 8


@pytest.mark.parametrize("extra", [None, {}])
def test_no_samples_leave_only_the_time(extra):
    args = make_args(log_passrate=True, log_multi_turn=True, log_correct_samples=True)
    assert compute_rollout_metrics(args, [], 2.0, extra) == {"perf/rollout_time": 2.0}


def test_equal_rewards_of_a_group_are_counted_by_value():
    samples = [make_sample(r, group_index=g) for g, r in [(0, 1), (0, 1.0), (1, 0.0), (1, -0.0), (2, 0.0), (2, 1.0)]]
    metrics = compute_rollout_metrics(make_args(), samples, 1.0)
    assert with_prefix(metrics, "rollout/zero_std") == {
        "rollout/zero_std/count_1.0": 1,
        "rollout/zero_std/count_0.0": 1,
    }


def test_neither_rounding_nor_a_failed_reward_is_a_difference():
    failed = {"reward_error": "TimeoutError"}
    samples = [make_sample(r, group_index=0) for r in (0.3, 0.1 + 0.2)]
    samples += [make_sample(1.0, group_index=1), make_sample(0.0, group_index=1, metadata=failed)]
    metrics = compute_rollout_metrics(make_args(), samples, 1.0)
    assert with_prefix(metrics, "rollout/zero_std") == {
        "rollout/zero_std/count_0.3": 1,
        "rollout/zero_std/count_1.0": 1,
    }


def test_ppo_has_no_zero_std_counts():
    samples = [make_sample(1.0, group_index=0), make_sample(1.0, group_index=0)]
    metrics = compute_rollout_metrics(make_args(advantage_estimator="ppo"), samples, 1.0)
    assert with_prefix(metrics, "rollout/zero_std") == {}


def test_dict_and_missing_rewards_do_not_break_any_metric():
    args = make_args(reward_key="score", log_passrate=True, log_reward_category="kind", log_correct_samples=True)
    rewards = [{"score": 1.0, "kind": "ok"}, {"score": 1.0, "kind": "bad"}, None, {"kind": "bad"}]
    metrics = compute_rollout_metrics(args, [make_sample(r, group_index=0) for r in rewards], 1.0)
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert with_prefix(metrics, "rollout/error_cat/") == {
        "rollout/error_cat/ok": 0.25,
        "rollout/error_cat/bad": 0.5,
    }
    assert (metrics["passrate/pass@1"], metrics["passrate/pass@2"]) == (1.0, 1.0)  # of the two that have a score


def test_failed_reward_is_left_out_unless_a_raw_reward_stands_beside_it():
    failed = {"reward_error": "TimeoutError"}
    samples = [make_sample(1.0, 5, group_index=0), make_sample(0.0, 9, group_index=0, metadata=failed)]
    samples += [make_sample(0.0, 7, group_index=0, metadata=failed | {"raw_reward": 1.0})]
    args = make_args(debug_rollout_only=True, log_passrate=True, log_correct_samples=True)
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert metrics["rollout/raw_reward"] == 1.0
    assert with_prefix(metrics, "passrate/") == {"passrate/pass@1": 1.0, "passrate/pass@2": 1.0}
    assert (metrics["correct_length/p25"], metrics["correct_length/p100"]) == (5, 7)
    results = {"rewards": [1.0, None, 1.0], "truncated": [False] * 3, "samples": samples}
    metrics = compute_eval_metrics(args, {"set": results})
    assert metrics["eval/set"] == 1.0 and metrics["eval/set-unscored_ratio"] == pytest.approx(1 / 3)
    assert metrics["eval/set-pass@2"] == 1.0 and "eval/set-pass@4" not in metrics


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), "1", [1.0], 10**400, object(), {"score": None}])
def test_what_is_no_number_is_no_reward(reward):
    samples = [make_sample(reward, group_index=0), make_sample({"score": 1.0}, group_index=0)]
    args = make_args(debug_rollout_only=True, log_passrate=True, reward_key="score", log_correct_samples=True)
    metrics = compute_rollout_metrics(args, samples, 1.0)
    assert metrics["rollout/raw_reward"] == 1.0 and metrics["rollout/zero_std/count_1.0"] == 1
    data = {"set": {"rewards": [reward, {"score": 1.0}], "samples": samples}}
    assert compute_eval_metrics(args, data)["eval/set"] == 1.0


def test_a_dict_reward_without_a_key_is_left_out():
    metrics = compute_rollout_metrics(make_args(), [make_sample({"a": 1}, group_index=0)], 1.0)
    assert with_prefix(metrics, "rollout/zero_std") == {}


def test_prefix_cache_rate_is_a_ratio_of_sums():
    samples = [make_sample(), make_sample()]
    samples[0].prefix_cache_info.cached_tokens, samples[0].prefix_cache_info.total_prompt_tokens = 9, 10
    samples[1].prefix_cache_info.total_prompt_tokens = 90
    metrics = sample_metrics(make_args(), samples)
    assert metrics["prefix_cache_hit_rate"] == pytest.approx(0.09)
    assert metrics["avg_cached_tokens_per_sample"] == 4.5


def test_speculative_rates_appear_only_with_an_algorithm():
    sample = make_sample()
    sample.spec_info.spec_accept_token_num, sample.spec_info.spec_draft_token_num = 3, 4
    sample.spec_info.completion_token_num, sample.spec_info.spec_verify_ct = 10, 4
    assert "spec_accept_rate" not in sample_metrics(make_args(), [sample])
    metrics = sample_metrics(make_args(sglang_speculative_algorithm="EAGLE"), [sample])
    assert (metrics["spec_accept_rate"], metrics["spec_accept_length"]) == (0.75, 2.5)


def test_kept_vocabulary_counts_trained_tokens_of_kept_samples():
    samples = [
        make_sample(length=4, rollout_top_p_token_offsets=[0, 3, 8, 10, 20], loss_mask=[1, 0, 1, 0]),
        make_sample(length=2, rollout_top_p_token_offsets=[0, 4, 9]),
        make_sample(length=1, rollout_top_p_token_offsets=[0, 99], remove_sample=True),
        make_sample(length=3),
    ]
    assert sample_metrics(make_args(), samples)["top_p_kept_vocab_per_token"] == 3.5
    assert "top_p_kept_vocab_per_token" not in sample_metrics(make_args(), samples[2:])


def test_repetition_needs_a_long_and_compressible_end():
    random_text = "".join(chr(33 + (zlib.crc32(bytes([i % 256, i // 256])) % 90)) for i in range(10_001))
    assert [has_repetition(t) for t in ("ab" * 5001, "ab" * 5000, random_text)] == [True, False, False]
    samples = [make_sample(response="ab" * 5001), make_sample(response="ok")]
    assert sample_metrics(make_args(), samples)["repetition_frac"] == 0.5


def test_truncated_ratio_is_the_share_of_that_status():
    samples = [make_sample(status="truncated"), make_sample(), make_sample(status="aborted"), make_sample()]
    assert sample_metrics(make_args(), samples)["truncated_ratio"] == 0.25
    samples[1] = make_sample(status="failed", metadata={"was_truncated": True})  # its reward failed
    assert sample_metrics(make_args(), samples)["truncated_ratio"] == 0.5


def test_throughput_over_time_and_slots():
    samples = [make_sample(length=30, loss_mask=[1] * 10 + [0] * 20), make_sample(length=10)]
    metrics = compute_rollout_metrics(make_args(), samples, 2.0)
    assert metrics["perf/tokens_per_gpu_per_sec"] == 10
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 5
    assert metrics["perf/longest_sample_tokens_per_sec"] == 15
    assert metrics["perf/longest_effective_sample_tokens_per_sec"] == 5
    assert not any("non_generation" in name for name in metrics)


def test_time_in_tools_is_taken_off_the_longest_sample():
    samples = [make_sample(length=30, non_generation_time=1.0), make_sample(length=10, non_generation_time=0.2)]
    samples[0].loss_mask = [1] * 6 + [0] * 24  # so the other one has more trained tokens
    metrics = compute_rollout_metrics(make_args(), samples, 4.0)
    assert metrics["perf/longest_effective_sample_non_generation_time"] == 0.2
    assert metrics["perf/longest_effective_sample_tokens_per_sec_without_non_generation"] == 10 / 3.8
    assert metrics["perf/longest_sample_non_generation_time"] == 1.0
    assert metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] == 10
    assert metrics["perf/non_generation_time/max"] == 1.0


@pytest.mark.parametrize("rollout_time", [0.0, 1.0])
def test_no_time_and_no_slots_divide_nothing(rollout_time):
    args = make_args(rollout_num_gpus=None)
    sample = make_sample(length=3, non_generation_time=1.0)
    metrics = compute_rollout_metrics(args, [sample], rollout_time)
    assert "perf/tokens_per_gpu_per_sec" not in metrics
    assert "perf/longest_sample_tokens_per_sec_without_non_generation" not in metrics


def test_extra_metrics_get_a_section_when_they_have_none():
    extra = {"dynamic_filter/drop_zero_std": 3, "rollout/kept": 1, "perf/x": 2}
    metrics = compute_rollout_metrics(make_args(), [], 1.0, extra)
    assert metrics["rollout/dynamic_filter/drop_zero_std"] == 3
    assert (metrics["rollout/kept"], metrics["perf/x"]) == (1, 2)


def test_pass_rates_count_a_split_execution_once_and_allow_uneven_groups():
    samples = [
        make_sample(1.0, group_index=0, rollout_id=7),
        make_sample(0.0, group_index=0, rollout_id=7),
        make_sample(0.0, group_index=0, rollout_id=8),
        make_sample(0.0, group_index=1),
        make_sample(1.0, group_index=1),
        make_sample(0.0, group_index=1),
        make_sample(0.0, group_index=1),
        make_sample(1.0, group_index=2),
    ]
    metrics = compute_rollout_metrics(make_args(log_passrate=True), samples, 1.0)
    assert with_prefix(metrics, "passrate/") == pytest.approx(
        {"passrate/pass@1": (1 / 2 + 1 / 4 + 1) / 3, "passrate/pass@2": (1 + 1 / 2) / 2, "passrate/pass@4": 1.0}
    )


@pytest.mark.parametrize("n", [0, 1])
def test_prompts_of_one_sample_have_no_pass_rates(n):
    samples = [make_sample(1.0, group_index=group) for group in range(3 * n)]
    args = make_args(log_passrate=True)
    assert with_prefix(compute_rollout_metrics(args, samples, 1.0), "passrate/") == {}
    assert not [name for name in compute_eval_metrics(args, {"set": {"rewards": [1.0] * 3 * n}}) if "pass@" in name]


def test_fb_r10_raw_reward_in_metadata_decides_what_is_correct_also_when_it_is_zero():
    samples = [make_sample(0.3, 5, metadata={"raw_reward": 1.0}), make_sample(1.0, 9, metadata={"raw_reward": 0.0})]
    metrics = compute_rollout_metrics(make_args(log_correct_samples=True), samples, 1.0)
    assert with_prefix(metrics, "correct_length/") == {f"correct_length/p{p}": 5 for p in (25, 50, 75, 100)}


def test_without_a_trainer_the_mean_reward_is_reported_here():
    samples = [make_sample(1.0), make_sample(None), make_sample(0.0)]
    assert compute_rollout_metrics(make_args(debug_rollout_only=True), samples, 1.0)["rollout/raw_reward"] == 0.5
    assert "rollout/raw_reward" not in compute_rollout_metrics(make_args(), samples, 1.0)


def test_multi_turn_lengths_and_clip_ratio():
    samples = [
        make_sample(length=10, loss_mask=[1] * 4 + [0] * 6, metadata={"round_number": 3}),
        make_sample(length=10),
        make_sample(length=5, metadata={"round_number": 1}),
    ]
    metrics = compute_rollout_metrics(make_args(log_multi_turn=True), samples, 1.0)
    assert metrics["multi_turn/raw_response_length/response_length_clip_ratio"] == pytest.approx(2 / 3)
    assert metrics["multi_turn/wo_obs_response_length/response_length_max"] == 10
    assert metrics["multi_turn/wo_obs_response_length/response_length_min"] == 4
    assert with_prefix(metrics, "multi_turn/multi_turn_metric/round_number_") == {
        f"multi_turn/multi_turn_metric/round_number_{name}": value
        for name, value in (("mean", 2), ("max", 3), ("min", 1))
    }
    assert metrics["multi_turn/raw_response_length/response_length_mean"] == pytest.approx(25 / 3)
    assert metrics["multi_turn/wo_obs_response_length/response_length_mean"] == pytest.approx(19 / 3)


def test_eval_reports_mean_truncation_and_pass_rates_per_data_set():
    samples = [make_sample(r, group_index=i // 2) for i, r in enumerate([1.0, 0.0, 0.0, 0.0])]
    data = {"aime": {"rewards": [1.0, 0.0, 0.0, 0.0], "truncated": [True, False, False, False], "samples": samples}}
    metrics = compute_eval_metrics(make_args(log_passrate=True), data, {"perf/eval_time": 3})
    assert metrics["eval/aime"] == 0.25
    assert metrics["eval/aime-truncated_ratio"] == 0.25
    assert (metrics["eval/aime-pass@1"], metrics["eval/aime-pass@2"]) == (0.25, 0.5)
    assert metrics["eval/aime/response_len/mean"] == 4
    assert metrics["perf/eval_time"] == 3


def test_eval_of_each_data_set_uses_its_own_sample_count_for_pass_rates():
    datasets = [types.SimpleNamespace(name="a", n_samples_per_eval_prompt=4)]
    args = make_args(log_passrate=True, eval_datasets=datasets, n_samples_per_eval_prompt=2)
    data = {"a": {"rewards": [1, 0, 0, 0]}, "b": {"rewards": [1, 0, 0, 0]}}
    metrics = compute_eval_metrics(args, data)
    assert metrics["eval/a-pass@4"] == 1.0
    assert metrics["eval/b-pass@2"] == 0.5


def test_eval_without_results_or_scores_is_not_an_error():
    assert compute_eval_metrics(make_args(log_passrate=True), {"a": {"rewards": [], "samples": []}}) == {}
    metrics = compute_eval_metrics(make_args(), {"a": {"rewards": [None, 1.0]}})
    assert metrics == {"eval/a": 1.0, "eval/a-unscored_ratio": 0.5}


def test_request_numbers_come_from_plain_and_streaming_spans_once():
    def span(span_id, name, **attrs):
        return [
            {"type": "span_start", "name": name, "span_id": span_id},
            {"type": "span_end", "name": name, "span_id": span_id, "attrs": attrs},
        ]

    trace = {"events": span("1", "sglang_generate", e2e_latency=1.0, queue_time=float("nan"))}
    trace["events"] += span("2", "sglang_generate_stream", e2e_latency=3.0, decode_throughput=50)
    trace["events"] += span("3", "reward_model", e2e_latency=99.0)
    trace["events"] += span("4", "sglang_generate")
    samples = [make_sample(trace=trace), make_sample(trace=trace), make_sample()]
    metrics = compute_rollout_metrics(make_args(), samples, 1.0)
    assert metrics["perf/request/e2e_latency/mean"] == 2.0
    assert metrics["perf/decode/throughput/max"] == 50
    assert (metrics["perf/request/count"], metrics["perf/request/profiled_count"]) == (3, 2)
    assert not any("queue_time" in name for name in metrics)


PD_ATTRS = {
    **{f"pd_prefill_{phase}_duration": f"prefill/{phase}_duration" for phase in ("bootstrap_queue", "bootstrap", "alloc_wait", "forward", "transfer_queue")},
    **{f"pd_decode_{phase}_duration": f"decode/{phase}_duration" for phase in ("prealloc", "bootstrap", "alloc_wait", "transfer", "forward")},
    "pd_transfer_speed_gb_s": "prefill/transfer_speed_gb_s",
    "pd_transfer_total_mb": "prefill/transfer_total_mb",
    "pd_prefill_retry_count": "prefill/retry_count",
    "queue_time": "request/queue_time",
    "e2e_latency": "request/e2e_latency",
    "decode_throughput": "decode/throughput",
}  # fmt: skip


@pytest.mark.parametrize("attribute, name", PD_ATTRS.items())
def test_each_number_of_a_request_is_described_under_its_name(attribute, name):
    ends = [
        {"type": "span_end", "name": "sglang_generate", "span_id": str(x), "attrs": {attribute: x}}
        for x in (1.0, 2.0, 6.0)
    ]
    metrics = compute_rollout_metrics(make_args(), [make_sample(trace={"events": ends})], 1.0)
    expected = {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    assert with_prefix(metrics, f"perf/{name}/") == {f"perf/{name}/{stat}": value for stat, value in expected.items()}


def test_quartiles_of_correct_lengths_are_lengths_of_samples():
    samples = [make_sample(1.0, length) for length in (40, 10, 20, 30)] + [make_sample(0.0, 99)]
    metrics = compute_rollout_metrics(make_args(log_correct_samples=True), samples, 1.0)
    assert with_prefix(metrics, "correct_length/") == {f"correct_length/p{p}": 0.4 * p for p in (25, 50, 75, 100)}


def test_dict_rewards_are_read_by_the_key_of_training_or_of_evaluation():
    samples = [make_sample({"score": x, "other": 1 - x}, group_index=0) for x in (1.0, 1.0, 0.0, 0.0)]
    args = make_args(reward_key="score", eval_reward_key="other", log_passrate=True, debug_rollout_only=True)
    metrics = compute_rollout_metrics(args, samples[:2] + [make_sample(None, group_index=0)], 1.0)
    assert metrics["rollout/raw_reward"] == 1.0 and metrics["rollout/zero_std/count_1.0"] == 1
    data = {"set": {"rewards": [s.reward for s in samples], "truncated": [False] * 4, "samples": samples}}
    metrics = compute_eval_metrics(args, data)
    assert metrics["eval/set"] == 0.5 and metrics["eval/set-pass@1"] == 0.5
    assert "eval/set/zero_std/count_1.0" not in metrics
