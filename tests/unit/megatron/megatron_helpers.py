"""Arguments, tiny models and shards for the tests of the Megatron backend."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

DEFAULTS = dict(
    # machine and layout
    omp_num_threads=1, actor_num_gpus_per_node=1, actor_num_nodes=1, distributed_timeout_minutes=2, seed=1234,
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1, sequence_parallel=False, precision="fp32",
    virtual_pipeline_model_parallel_size=None, microbatch_group_size_per_vp_stage=None,
    decoder_first_pipeline_num_layers=None, decoder_last_pipeline_num_layers=None,
    deterministic_mode=False,
    # model
    multi_latent_attention=False, moe_layer_freq=1, num_layers=None, hidden_size=None, ffn_hidden_size=None, num_attention_heads=None, group_query_attention=False,
    num_query_groups=None, kv_channels=None, vocab_size=None, padded_vocab_size=None, make_vocab_size_divisible_by=1,
    normalization="LayerNorm", norm_epsilon=1e-5, apply_layernorm_1p=False, swiglu=False, add_bias_linear=True,
    add_qkv_bias=False, qk_layernorm=False, untie_embeddings_and_output_weights=False, num_experts=None,
    position_embedding_type="rope", rotary_base=10000, rotary_percent=1.0, use_rope_scaling=False,
    rope_scaling_factor=8.0, max_position_embeddings=None, seq_length=4096, hidden_dropout=0.0, attention_dropout=0.0,
    init_method_std=0.02, spec=None, custom_model_provider_path=None, freeze_params_name_list=None,
    only_train_params_name_list=None, data_pad_size_multiplier=1,
    recompute_granularity=None, recompute_method=None, recompute_num_layers=None, recompute_modules=None,
    # experts
    moe_router_topk=2, moe_ffn_hidden_size=None, moe_router_load_balancing_type="aux_loss", moe_router_dtype=None,
    moe_router_score_function="softmax", moe_router_pre_softmax=False, moe_router_enable_expert_bias=False,
    moe_router_bias_update_rate=1e-3, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, moe_per_layer_logging=False,
    moe_shared_expert_intermediate_size=None,
    lora_rank=0, lora_alpha=32.0, lora_dropout=0.0, target_modules=None, lora_adapters=("actor",),
    lora_adapter_path=None, lora_sync="merged", lora_base=None,
    # optimizer
    optimizer="adam", lr=1e-3, min_lr=0.0, lr_decay_style="constant", lr_decay_iters=None, lr_warmup_iters=0,
    lr_warmup_fraction=None, lr_warmup_init=0.0, lr_wsd_decay_iters=None, lr_wsd_decay_style="exponential",
    weight_decay=0.0, start_weight_decay=None, end_weight_decay=None, weight_decay_incr_style="constant",
    adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8, sgd_momentum=0.0, clip_grad=1.0, use_distributed_optimizer=True,
    accumulate_allreduce_grads_in_fp32=True, overlap_grad_reduce=False, overlap_param_gather=False,
    use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=False, reset_optimizer_states=False,
    use_stateless_adam=False, decoupled_weight_decay=True,
    # loss
    loss_type="policy_loss", advantage_estimator="grpo", calculate_per_token_loss=False, eps_clip=0.2,
    eps_clip_high=0.2, eps_clip_c=None, entropy_coef=0.0, kl_coef=0.0, kl_loss_coef=0.0, kl_loss_type="k1",
    use_kl_loss=False, use_unbiased_kl=False, use_rollout_logprobs=False, use_tis=False, tis_clip=2.0,
    tis_clip_low=0.0, get_mismatch_metrics=False, custom_tis_function_path=None, use_opsm=False, opsm_delta=1e-4,
    use_opd=False, opd_type=None, opd_kl_coef=1.0, opd_teacher_load=None, opd_teacher_ckpt_step=None,
     normalize_advantages=False, gamma=1.0, lambd=1.0,
    rollout_temperature=1.0, rollout_top_p=1.0, rollout_max_response_len=32, mismatch_alarm=None,
    rollout_precision="fp32", update_weights_interval=1, log_probs_chunk_size=-1, use_rollout_entropy=False,
    recompute_loss_function=False, custom_loss_function_path=None, custom_pg_loss_reducer_function_path=None,
    custom_advantage_function_path=None, compute_advantages_and_returns=True, keep_old_actor=False,
    use_critic=False, value_clip=0.2, use_routing_replay=False, use_rollout_routing_replay=False,
    # rounds
    num_rollout=4, rollout_batch_size=2, n_samples_per_prompt=2, global_batch_size=4, micro_batch_size=1,
    share_prompts=False, skip_zero_advantage=False,
    use_dynamic_batch_size=False, max_tokens_per_gpu=None, log_probs_max_tokens_per_gpu=None, ref_update_interval=None,
    # hooks
    rollout_data_postprocess_path=None, custom_megatron_init_path=None, custom_update_weight_post_write_path=None, reward_key=None, custom_megatron_before_log_prob_hook_path=None,
    custom_megatron_before_train_step_hook_path=None,
    # checkpoints
    hf_checkpoint=None, load=None, ref_load=None, ref_ckpt_step=None, ckpt_step=None, save=None, no_load_optim=None,
    no_load_rng=None, no_save_optim=None, no_save_rng=None, finetune=False, save_hf=None, save_debug_train_data=None,
    async_save=False,
    ci_test=False, log_correct_samples=False,
)  # fmt: skip


def train_args(model_dir=None, **overrides) -> SimpleNamespace:
    """Return the arguments of a run; the architecture comes from the config.json of `model_dir`."""
    values = dict(DEFAULTS)
    if model_dir is not None:
        values["hf_checkpoint"] = str(model_dir)
        values["model_arch"] = json.loads((Path(model_dir) / "config.json").read_text())
    unknown = overrides.keys() - values.keys()
    assert not unknown, unknown
    return SimpleNamespace(**{**values, **overrides})


def random_tokens(lengths, vocab=260, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def make_shard(
    args, lengths=(9, 12, 7, 15), responses=(4, 6, 3, 8), micro_batches=None, num_steps=1, seed=0, **columns
):
    """Return a shard as the Data Buffer sends it: GRPO-like rewards, all masks one, one step unless asked otherwise."""
    count = len(lengths)
    tokens = random_tokens(lengths, seed=seed)
    masks = columns.pop("loss_masks", None) or [torch.ones(n, dtype=torch.int32) for n in responses]
    if micro_batches is None:
        micro_batches = [[i] for i in range(count)]
    per_step = len(micro_batches) // num_steps
    shard = {
        "tokens": tokens,
        "response_lengths": list(responses),
        "rewards": [1.0 if i % 2 == 0 else -1.0 for i in range(count)],
        "raw_reward": [float(i % 2 == 0) for i in range(count)],
        "truncated": [0] * count,
        "sample_indices": [100 + i for i in range(count)],
        "rollout_ids": list(range(count)),
        "loss_masks": masks,
        "rollout_mask_sums": torch.tensor([float(m.sum()) for m in masks]),
        "total_lengths": list(lengths),
        "partition": list(range(count)),
        "global_batch_sizes": [count // num_steps] * num_steps,
        "num_microbatches": [per_step] * num_steps,
        "micro_batch_indices": micro_batches,
    }
    shard.update(columns)
    return shard
