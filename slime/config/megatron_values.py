"""Values of Megatron's flags that the framework forces or derives after the model's shape is known."""

from __future__ import annotations

from slime.config.layout import parallel_sizes


def resolve_megatron(run) -> None:
    """Derive parallel sizes and the trainer's fixed settings."""
    args = run.args
    parallel_sizes(run)
    args.layernorm_epsilon = args.norm_epsilon
    args.use_distributed_optimizer = True
    args.variable_seq_lengths = True
    args.enable_gloo_process_groups = True
    args.tokenizer_type, args.tokenizer_model = "HuggingFaceTokenizer", args.hf_checkpoint
    args.rank = 0
    if args.num_rollout is not None:
        args.train_iters = args.num_rollout * args.num_steps_per_rollout
    if args.lr_decay_iters is None:
        args.lr_decay_iters = args.train_iters or None
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.seq_length is None:
        args.seq_length = 4096
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.ffn_hidden_size is None and args.hidden_size is not None:
        args.ffn_hidden_size = 4 * args.hidden_size
    if args.kv_channels is None and args.hidden_size is not None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.recompute_activations and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full" and args.recompute_method is None:
        args.recompute_method, args.recompute_num_layers = "uniform", args.recompute_num_layers or 1
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
        run.notes.append("--sequence-parallel has no effect without tensor parallelism")
