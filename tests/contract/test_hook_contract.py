"""Names, signatures and outputs that users' code relies on."""

import importlib
import inspect
from types import SimpleNamespace

import pytest

from slime.rollout.base_types import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    call_rollout_fn,
    call_rollout_path,
    leaves_of,
)
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer, call_dynamic_filter
from slime.rollout.sglang_rollout import generate, generate_rollout
from slime.utils.types import Sample

NAMES = {
    "slime.utils.types": ["Sample", "RolloutBatch"],
    "slime.rollout.base_types": ["RolloutFnTrainOutput", "RolloutFnEvalOutput", "call_rollout_fn"],
    "slime.rollout.sglang_rollout": [
        "generate_rollout", "GenerateState", "generate", "generate_and_rm", "generate_and_rm_group", "get_model_url",
        "eval_rollout", "abort",
    ],
    "slime.rollout.data_source": ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"],
    "slime.rollout.filter_hub.base_types": ["DynamicFilterOutput", "MetricGatherer", "call_dynamic_filter"],
    "slime.rollout.filter_hub.dynamic_sampling_filters": [
        "check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback",
    ],
    "slime.rollout.sglang_streaming_rollout": ["generate_streaming"],
    "slime.rollout.fully_async_rollout": ["generate_rollout_fully_async"],
    "slime.rollout.sleep_rollout": ["sleep"],
    "slime.utils.http_utils": [
        "post", "get", "init_http_client", "find_available_port", "is_port_available", "get_host_info",
    ],
    "slime.utils.async_utils": ["run", "get_async_loop", "AsyncLoopThread"],
    "slime.utils.misc": ["load_function", "SingletonMeta", "Box", "group_by", "should_run_periodic_action"],
    "slime.utils.data": ["Dataset", "read_file"],
    "slime.utils.arguments": ["parse_args"],
    "slime.utils.eval_config": ["EvalDatasetConfig"],
    "slime.utils.ppo_utils": [
        "calculate_log_probs_and_entropy", "compute_approx_kl", "compute_cispo_loss", "compute_gspo_kl", "compute_log_probs",
        "compute_opsm_mask", "compute_policy_loss", "get_advantages_and_returns", "get_advantages_and_returns_batch",
        "get_grpo_returns", "get_reinforce_plus_plus_baseline_advantages", "get_reinforce_plus_plus_returns", "vanilla_gae",
        "chunked_gae",
    ],
    "slime.utils.distributed_utils": [
        "distributed_masked_whitening", "get_gloo_group", "init_gloo_group", "init_process_group",
    ],
    "slime.utils.memory_utils": ["clear_memory", "print_memory", "available_memory"],
    "slime.utils.external_utils.command_utils": ["exec_command", "execute_train", "convert_checkpoint", "create_run_id"],
    **{
        f"slime.{package}.{module}": names
        for package in ("utils", "observability")
        for module, names in {
            "metric_utils": [
                "compute_statistics", "compute_rollout_step", "compute_pass_rate", "has_repetition", "dict_add_prefix",
            ],
            "logging_utils": ["configure_logger", "log", "init_tracking", "finish_tracking"],
            "timer": ["Timer", "timer", "inverse_timer"],
        }.items()
    },
    "slime.utils.tracking_utils": ["log", "init_tracking", "finish_tracking"],
    "slime.utils.trace_utils": ["trace_span", "trace_event", "trace_function", "bind_trace"],
    "slime.backends.megatron_utils.cp_utils": [
        "get_sum_of_sample_mean", "all_gather_with_cp", "slice_log_prob_with_cp", "get_logits_and_tokens_offset_with_cp",
    ],
    "slime.backends.megatron_utils.loss": [
        "get_log_probs_and_entropy", "get_responses", "policy_loss_function", "sft_loss_function", "vanilla_tis_function",
        "icepop_function",
    ],
    "slime.backends.megatron_utils.model_provider": ["get_model_provider_func"],
    "slime.ray.rollout": ["compute_metrics_from_samples", "compute_perf_metrics_from_samples"],
    "slime.ray.placement_group": ["create_placement_groups", "create_rollout_manager", "create_training_models"],
    "slime.utils.processing_utils": [
        "load_tokenizer", "load_processor", "build_processor_kwargs", "encode_image_for_rollout_engine",
        "process_vision_info",
    ],
    "slime.rollout": ["generate_single"],
    "slime.rollout.rm_hub": ["async_rm", "batched_async_rm"],
    "slime.rollout.on_policy_distillation": ["reward_func", "post_process_rewards"],
    "slime.rollout.sft_rollout": ["generate_rollout"],
    "slime.rollout.forge_load": ["generate_rollout"],
    "slime.utils.mask_utils": ["MultiTurnLossMaskGenerator"],
    "slime.observability.trace_utils": ["trace_span", "trace_event", "trace_function", "bind_trace"],
    "slime.ray.session": ["Session"],
}  # fmt: skip


@pytest.mark.parametrize("module, name", [(m, n) for m, names in NAMES.items() for n in names])
def test_public_name_is_importable(module, name):
    assert hasattr(importlib.import_module(module), name)


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_rollout_function_signature():
    def reference(args, rollout_id, data_source, evaluation=False): ...

    assert parameters(generate_rollout) == parameters(reference)


def test_generate_takes_args_sample_and_sampling_params_first():
    assert inspect.iscoroutinefunction(generate)
    assert list(inspect.signature(generate).parameters)[:3] == ["args", "sample", "sampling_params"]


def test_legacy_outputs_are_wrapped():
    groups = [[Sample()]]
    train = call_rollout_fn(lambda args, i, d, evaluation: groups, None, 0, None, evaluation=False)
    assert train == RolloutFnTrainOutput(samples=groups)
    data = {"set": {"rewards": [1.0], "truncated": [False]}}
    assert call_rollout_fn(lambda args, i, d, evaluation: data, None, 0, None, evaluation=True) == RolloutFnEvalOutput(
        data
    )
    output = RolloutFnTrainOutput(samples=groups, metrics={"a": 1})
    assert call_rollout_fn(lambda evaluation: output, evaluation=False) is output


def test_parts_of_one_execution_must_share_a_rollout_id():
    def call(groups):
        return call_rollout_fn(lambda evaluation: groups, evaluation=False)

    call([[Sample(), Sample()]])
    call([[[Sample()], Sample()]])
    call([[[Sample(rollout_id=1), Sample(rollout_id=1)], [Sample()]]])
    with pytest.raises(AssertionError, match=r"samples\[0\]\[1\]: 2 samples .*\[1, 2\]"):
        call([[Sample(), [Sample(rollout_id=1), Sample(rollout_id=2)]]])
    with pytest.raises(AssertionError, match=r"\[None, None\]"):
        call([[[Sample(), Sample()]]])


def test_groups_without_samples_are_left_out_of_a_round(tmp_path):
    lines = ["from slime.utils.types import Sample", "def rollout_function(args, rollout_id, data_source, evaluation):"]
    (tmp_path / "rounds.py").write_text("\n".join([*lines, "    return [[], [Sample(prompt='p'), []], [[]]]"]))
    args = SimpleNamespace(rollout_function_path=f"{tmp_path}/rounds.py")
    output = call_rollout_path(args, "rollout_function_path", 0, None, evaluation=False)
    assert [[leaf.prompt for leaf in leaves_of(group)] for group in output.samples] == [["p"]]


def test_dynamic_filter_answers():
    assert call_dynamic_filter(None, None, []).keep
    assert call_dynamic_filter(lambda args, samples: False, None, []) == DynamicFilterOutput(keep=False)
    answer = DynamicFilterOutput(keep=False, reason="r", keep_when_insufficient=True)
    assert call_dynamic_filter(lambda args, samples: answer, None, []) is answer
    gatherer = MetricGatherer()
    for reason in ("a", "a", None):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2}


def test_check_hooks_spells_out_bare_files_and_names_the_flag_of_a_wrong_one(make_args, tmp_path):
    from slime.rollout.hooks import check_rollout_hooks
    from slime.utils.hook_table import ROLLOUT_HOOKS
    from slime.utils.misc import load_function

    (tmp_path / "my_generate.py").write_text("async def generate(args, sample, sampling_params): ...\n")
    args = make_args()
    for option in ROLLOUT_HOOKS:
        if option not in vars(args):
            setattr(args, option, None)
    args.custom_generate_function_path = str(tmp_path / "my_generate.py")
    args.rollout_sample_hook_path = ["stub_rm.tag_hook"]
    check_rollout_hooks(args)
    assert load_function(args.custom_generate_function_path).__name__ == "generate"
    args.dynamic_sampling_filter_path = "stub_rm.no_such_filter"
    with pytest.raises(ValueError, match="--dynamic-sampling-filter-path: 'stub_rm.no_such_filter'"):
        check_rollout_hooks(args)
    args.dynamic_sampling_filter_path = None
    args.eval_datasets = [
        SimpleNamespace(name="aime", custom_generate_function_path=None, custom_rm_path="stub_rm.seen")
    ]
    with pytest.raises(
        ValueError, match="evaluation set aime: --custom-rm-path stub_rm.seen is a dict, which cannot be called"
    ):
        check_rollout_hooks(args)


def test_the_rollout_reads_only_flags_that_exist():
    """Every `args.x` in the rollout code is a declared flag, a derived value, or set by the launcher."""
    import re
    from pathlib import Path

    import slime.rollout
    from slime.config.registry import by_dest

    folder = Path(slime.rollout.__file__).parent
    used = {name for file in folder.rglob("*.py") for name in re.findall(r"\bargs\.([a-z_0-9]+)", file.read_text())}
    derived = {
        "model_arch",
        "eval_datasets",
        "rollout_num_engines",
        "rounds_ahead",
        "sglang_model_routers",
        "moe_router_topk",
        "num_layers",
    }
    assert not used - set(by_dest()) - derived
