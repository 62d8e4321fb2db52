"""When the two savings of a training pass leave the gradient as it is.

`--share-prompts` needs a model that treats each token by its own context alone; `--skip-zero-advantage` needs a loss in
which the advantage is a factor of everything. Anything else is refused with the flag that is in the way.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime.config.algorithm import GROUP_RELATIVE

_USER_FUNCTIONS = (
    "custom_advantage_function_path",
    "custom_pg_loss_reducer_function_path",
    "custom_tis_function_path",
    "rollout_data_postprocess_path",
)


def problems(args, given: set[str]) -> Iterator[str]:
    """Give what stands against a saving that was asked for."""
    if args.share_prompts:
        for obstacle in _against_sharing(args):
            yield f"--share-prompts cannot be used with {obstacle}"
    if args.skip_zero_advantage:
        for obstacle in _against_skipping(args):
            yield f"--skip-zero-advantage cannot be used with {obstacle}: samples without advantage then have a gradient"


def _against_sharing(args) -> Iterator[str]:
    if args.loss_type == "custom_loss":
        yield "--loss-type custom_loss, which sees whole samples"
    if has_experts(args):
        yield "a mixture of experts, whose balance counts tokens"
    if args.hidden_dropout or args.attention_dropout or args.lora_dropout:
        yield "dropout, which differs between samples"
    if args.multimodal_keys:
        yield "--multimodal-keys: equal prompt ids may stand for different media"


def _against_skipping(args) -> Iterator[str]:
    if args.loss_type != "policy_loss":
        yield f"--loss-type {args.loss_type}"
    if args.advantage_estimator not in GROUP_RELATIVE:
        yield f"--advantage-estimator {args.advantage_estimator}"
    for name in ("kl_coef", "entropy_coef"):
        if getattr(args, name) != 0:
            yield f"--{name.replace('_', '-')} {getattr(args, name)}"
    if args.use_kl_loss:
        yield "--use-kl-loss"
    for name in ("normalize_advantages", "use_opd"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}"
    for name in _USER_FUNCTIONS:
        if getattr(args, name):
            yield f"--{name.replace('_', '-')} {getattr(args, name)}"
    if has_experts(args):
        yield "a mixture of experts, whose balance counts tokens"
    if args.hidden_dropout or args.attention_dropout or args.lora_dropout:
        yield "dropout"


def has_experts(args) -> bool:
    shape = args.model_arch.get("text_config") or args.model_arch
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return bool(args.num_experts) or any(shape.get(name) for name in names)
