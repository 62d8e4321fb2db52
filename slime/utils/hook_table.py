"""The hooks: how each is called and what it returns, as data.

One row per flag; `text` is what error messages and the documents show. Signatures do not change between versions. Which of
several documented forms a function has is told in `slime.utils.hook_forms`, checks and calls are in `slime.utils.hook_calls`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """text: signature and result in words. methods: what a class has to have; functions have none.

    positional: names of what is given by position. keywords: of what is always given by keyword. optional: of what is given by
    keyword to functions that have such a parameter.
    """

    text: str
    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()


def _hook(text: str, positional: str = "", keywords: str = "", optional: str = "", methods: str = "") -> Hook:
    return Hook(text, *(tuple(names.split()) for names in (positional, keywords, optional, methods)))


_ROUND = "(args, rollout_id, data_source, evaluation=False) -> "
_EVAL_OUTPUT = 'RolloutFnEvalOutput or {set: {"rewards": [...], "truncated": [...], "samples": [...]}}'

ROLLOUT_HOOKS: dict[str, Hook] = {
    "rollout_function_path": _hook(
        f"{_ROUND}RolloutFnTrainOutput or a list of groups; with evaluation=True {_EVAL_OUTPUT}",
        "args rollout_id data_source",
        "evaluation",
    ),
    "eval_function_path": _hook(f"{_ROUND}{_EVAL_OUTPUT}", "args rollout_id data_source", "evaluation"),
    "custom_generate_function_path": _hook(
        "(args, sample, sampling_params[, evaluation]) -> Sample or list of Samples, or "
        "(args, samples, evaluation=False) -> one of these for each sample"
    ),
    "rollout_sample_hook_path": _hook(
        "(args, sample, *, rollout_id=None, evaluation=False) -> Sample or None",
        "args sample",
        "",
        "rollout_id evaluation",
    ),
    "custom_rm_path": _hook(
        "(args, sample, **kwargs) -> number or dict, (args, samples, **kwargs) -> one of these for each sample, or a class with "
        "__init__(model_path) and compute_reward(prompts, responses) -> one number each"
    ),
    "dynamic_sampling_filter_path": _hook("(args, samples, **kwargs) -> DynamicFilterOutput or bool", "args samples"),
    "round_policy_path": _hook(
        "class (args) like slime.rollout.round_policy.RoundPolicy",
        "args",
        methods="num_to_start is_over is_due is_too_old leftover",
    ),
    "buffer_filter_path": _hook(
        "(args, rollout_id, buffer, num_samples) -> list of at most num_samples groups, removed from buffer",
        "args rollout_id buffer num_samples",
    ),
    "rollout_sample_filter_path": _hook("(args, groups) -> None; sets sample.remove_sample", "args groups"),
    "rollout_all_samples_process_path": _hook("(args, all_groups, data_source) -> None", "args all_groups data_source"),
    "data_source_path": _hook(
        "class (args) or () with get_samples(num_samples) -> list of groups, and, where it has them, add_samples(groups), "
        "save(rollout_id), load(rollout_id), state_dict(), load_state_dict(state), __len__()",
        methods="get_samples",
    ),
    "custom_reward_post_process_path": _hook(
        "(args, samples, **kwargs) -> (raw_rewards, rewards), a number for each sample", "args samples"
    ),
    "custom_convert_samples_to_train_data_path": _hook(
        "(args, samples) -> dict of lists: tokens, response_lengths, rewards, raw_reward, truncated, sample_indices, loss_masks, "
        "and any other column",
        "args samples",
    ),
    "custom_rollout_log_function_path": _hook(
        "(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> true to leave out the built-in metrics",
        "rollout_id args samples rollout_extra_metrics rollout_time",
    ),
    "custom_eval_rollout_log_function_path": _hook(
        "(rollout_id, args, data, extra_metrics) -> true to leave out the built-in metrics",
        "rollout_id args data extra_metrics",
    ),
}

TRAINER_HOOKS: dict[str, Hook] = {
    "rollout_data_postprocess_path": _hook(
        "(args, rollout_id, rollout_data) -> None; changes the columns of rollout_data", "args rollout_id rollout_data"
    ),
    "custom_advantage_function_path": _hook(
        '(args, rollout_data) -> None; sets rollout_data["advantages"] and ["returns"], a tensor [response_length] per sample',
        "args rollout_data",
    ),
    "custom_loss_function_path": _hook(
        "(args, batch, logits, sum_of_sample_mean) -> (loss, {name: value})", "args batch logits sum_of_sample_mean"
    ),
    "custom_tis_function_path": _hook(
        "(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs) -> "
        "(pg_loss, loss_masks, {name: tensor like pg_loss})",
        "",
        "args pg_loss train_log_probs rollout_log_probs loss_masks total_lengths response_lengths",
    ),
    "custom_pg_loss_reducer_function_path": _hook(
        "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> function from a tensor of all tokens to a scalar",
        "total_lengths response_lengths loss_masks calculate_per_token_loss",
    ),
    "custom_megatron_init_path": _hook("(args) -> None", "args"),
    "custom_megatron_before_log_prob_hook_path": _hook(
        "(args, model, store_prefix) -> None", "args model store_prefix"
    ),
    "custom_megatron_before_train_step_hook_path": _hook(
        "(args, rollout_id, step_id, model, optimizer, opt_param_scheduler) -> None",
        "args rollout_id step_id model optimizer opt_param_scheduler",
    ),
    "custom_model_provider_path": _hook(
        "(*, pre_process, post_process, vp_stage=None, args=None) -> torch.nn.Module like Megatron's GPTModel",
        "",
        "pre_process post_process",
        "vp_stage",
    ),
    "spec": _hook(
        "(args, config, vp_stage) -> Megatron's ModuleSpec of a layer, or the TransformerBlockSubmodules of all",
        "args config vp_stage",
    ),
    "custom_update_weight_post_write_path": _hook(
        "(args, version_dir, rollout_engines) -> None", "args version_dir rollout_engines"
    ),
    "advantage_estimator": _hook(
        "(AdvantageInputs) -> (advantages, returns), a tensor [response_length] per sample", "inputs"
    ),
}

HOOKS = ROLLOUT_HOOKS | TRAINER_HOOKS
