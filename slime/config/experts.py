"""What must hold between the flags of a mixture of experts.

Sizes against the model's config.json are compared in model_shape.py.
"""

from __future__ import annotations

from collections.abc import Iterator

_REPLAYS = ("use_rollout_routing_replay", "use_routing_replay")
_NEEDS_EXPERTS = ("moe_router_enable_expert_bias", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def problems(args, given: set[str]) -> Iterator[str]:
    """Give what stands against training these experts on this layout."""
    if args.debug_rollout_only:
        return
    if not args.num_experts:
        yield from _without_experts(args)
        return
    yield from _router(args)
    yield from _layout(args)
    if args.use_routing_replay:
        yield from _replay(args)


def _without_experts(args) -> Iterator[str]:
    if args.expert_model_parallel_size > 1:
        yield f"--expert-model-parallel-size {args.expert_model_parallel_size}: the model has no experts"
    for dest in (*_NEEDS_EXPERTS, *_REPLAYS):
        implied = dest == "use_routing_replay" and args.use_rollout_routing_replay
        if getattr(args, dest) and not implied:
            yield f"--{dest.replace('_', '-')}: the model has no experts"


def _router(args) -> Iterator[str]:
    if not 1 <= args.moe_router_topk <= args.num_experts:
        yield f"--moe-router-topk {args.moe_router_topk}: the model has {args.num_experts} experts"
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        yield (
            "--moe-router-enable-expert-bias balances routers that score with a sigmoid; this one has "
            f"--moe-router-score-function {args.moe_router_score_function}: use --moe-aux-loss-coeff"
        )
    if args.moe_aux_loss_coeff < 0 or (args.moe_z_loss_coeff or 0) < 0:
        yield f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff}, --moe-z-loss-coeff {args.moe_z_loss_coeff}: not below 0"
    if args.moe_aux_loss_coeff and args.moe_router_load_balancing_type == "none":
        yield f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff} needs a --moe-router-load-balancing-type other than none"
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        yield f"--moe-layer-freq names {len(pattern)} layers, the model has {args.num_layers}"


def _layout(args) -> Iterator[str]:
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    expert, expert_tensor = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tensor
    if tensor > 1 and not args.sequence_parallel:
        yield f"--tensor-model-parallel-size {tensor} with experts needs --sequence-parallel: routers see each token once"
    if args.num_experts % expert:
        yield f"--expert-model-parallel-size {expert} does not divide the {args.num_experts} experts of the model"
    block = expert * expert_tensor * pipeline
    if args.world_size % block:
        yield (
            f"--expert-model-parallel-size {expert} x --expert-tensor-parallel-size {expert_tensor} x "
            f"--pipeline-model-parallel-size {pipeline} = {block} does not divide the trainer's {args.world_size} slots"
        )


def _replay(args) -> Iterator[str]:
    flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
    if args.moe_router_fusion:
        yield f"{flag} with --moe-router-fusion: a fused router cannot be told which experts to take"
    if args.use_rollout_routing_replay:
        return
    if args.loss_type != "policy_loss":
        yield f"{flag} with --loss-type {args.loss_type}: no pass before training records experts"
    elif args.use_rollout_logprobs and not args.get_mismatch_metrics:
        yield (
            f"{flag} with --use-rollout-logprobs: no pass before training records experts; "
            "--use-rollout-routing-replay takes the engine's"
        )
