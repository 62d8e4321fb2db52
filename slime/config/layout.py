"""How the trainer's ranks are laid out: tensor, pipeline, context and data parallel sizes, and what they must divide.

Derives data_parallel_size and the virtual pipeline. Every error names the flags. It does not know the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.config.spec import UserError

_SIZES = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
}


def parallel_sizes(run) -> None:
    """Derive the data-parallel size from the world and the others, and the virtual pipeline from its three spellings.

    Raises: UserError when the slots of the trainer do not divide.
    """
    args = run.args
    for dest, flag in _SIZES.items():
        if getattr(args, dest) < 1:
            raise UserError(f"{flag} {getattr(args, dest)}: must be at least 1")
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if args.world_size % (tp * pp * cp) and not args.debug_rollout_only:
        raise UserError(
            f"--actor-num-nodes {args.actor_num_nodes} x --actor-num-gpus-per-node {args.actor_num_gpus_per_node} = "
            f"{args.world_size} slots do not divide by --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {tp * pp * cp}"
        )
    args.data_parallel_size = args.world_size // (tp * pp * cp)
    _virtual_pipeline(args)


def _virtual_pipeline(args) -> None:
    """Set virtual_pipeline_model_parallel_size and microbatch_group_size_per_vp_stage, both None without virtual stages."""
    per_stage, stages = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if per_stage is not None and stages is not None:
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank {stages}: "
            "use one of them"
        )
    pp = args.pipeline_model_parallel_size
    if per_stage is not None and args.num_layers is not None:
        if per_stage < 1 or args.num_layers % (pp * per_stage):
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage}: {args.num_layers} layers over "
                f"--pipeline-model-parallel-size {pp} do not divide into stages of {per_stage}"
            )
        stages = args.num_layers // pp // per_stage
    if stages is not None:
        args.virtual_pipeline_model_parallel_size = stages
    if args.virtual_pipeline_model_parallel_size == 1:
        args.virtual_pipeline_model_parallel_size = None
    if args.virtual_pipeline_model_parallel_size is None:
        args.microbatch_group_size_per_vp_stage = None
    elif args.microbatch_group_size_per_vp_stage is None:
        args.microbatch_group_size_per_vp_stage = pp


def problems(args, given: set[str]) -> Iterator[str]:
    """Give what the model or other flags have against the layout."""
    if args.debug_rollout_only or args.num_layers is None:
        return
    yield from _tensor(args)
    yield from _pipeline(args)
    yield from _context(args)


def _tensor(args) -> Iterator[str]:
    tp = args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    counts = {"attention heads": args.num_attention_heads, "key-value heads": groups, "hidden size": args.hidden_size}
    if args.ffn_hidden_size is not None:
        counts["feed-forward size"] = args.ffn_hidden_size
    wrong = [f"{name} ({count})" for name, count in counts.items() if count is not None and count % tp]
    if wrong:
        yield f"--tensor-model-parallel-size {tp} does not divide the model's {', '.join(wrong)}"


def _pipeline(args) -> Iterator[str]:
    pp, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    ends = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    if any(ends) and pp == 1:
        yield "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers need --pipeline-model-parallel-size"
        return
    layers = args.num_layers - sum(end for end in ends if end is not None)
    stages = pp - sum(end is not None for end in ends)
    if layers < 0 or (layers % stages if stages else layers):
        yield (
            f"--pipeline-model-parallel-size {pp}: {args.num_layers} layers cannot be spread evenly over the stages "
            "(--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers set those of the ends)"
        )
    if virtual is None:
        return
    shown = f"--num-virtual-stages-per-pipeline-rank {virtual}"
    if virtual < 1 or pp == 1:
        yield f"{shown} needs --pipeline-model-parallel-size of at least 2"
    elif any(end is not None and end % virtual for end in ends) or (stages and layers // stages % virtual):
        yield f"{shown}: the layers of a pipeline stage do not divide by it"
    group = args.microbatch_group_size_per_vp_stage
    if group < pp:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {pp}"
        )


def _context(args) -> Iterator[str]:
    if args.context_parallel_size == 1:
        return
    shown = f"--context-parallel-size {args.context_parallel_size}"
    if args.share_prompts:
        yield f"{shown} cannot be used with --share-prompts: a shared prompt belongs to no single sequence"
