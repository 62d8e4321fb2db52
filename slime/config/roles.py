"""What actor and critic have of their own: overrides of --megatron-config-path, and what a critic never does.

``role_args`` gives the arguments of one role's ranks; the driver and the rollout side keep those of the command line. The file:

    megatron:
      - {name: critic, role: critic, overrides: {lr: 1e-5, load: /path/to/weights}}
"""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Iterator
from typing import Any

from slime.config.checkpoint_paths import megatron_folder
from slime.config.model_shape import is_hf_folder
from slime.config.parse import standard_parser
from slime.config.paths import absolute, absolute_hook
from slime.config.registry import by_dest
from slime.config.spec import UserError
from slime.config.yaml_file import convert, read_mapping

ROLES = ("actor", "critic")
_FLAG = "--megatron-config-path"
_SHAPE = "the file holds `megatron: [{name: critic, role: critic, overrides: {lr: 1e-5}}]`"
#: Of a critic: it has no reference or teacher of its own, and no routing to replay.
_CRITIC = {
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
    "use_routing_replay": False,
    "use_rollout_routing_replay": False,
}
#: Placement has flags of its own; old files carry these keys.
_IGNORED = ("num_nodes", "num_gpus_per_node")
#: One schedule of micro-batches and one layout serve all roles.
_COMMON = frozenset(
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size virtual_pipeline_model_parallel_size sequence_parallel actor_num_nodes actor_num_gpus_per_node
    advantage_estimator rollout_batch_size n_samples_per_prompt global_batch_size num_steps_per_rollout num_rollout num_epoch
    micro_batch_size use_dynamic_batch_size max_tokens_per_gpu balance_data balance_by_flops hf_checkpoint""".split()
)
#: Of the actor these decide where the run goes on and where it saves, before roles are looked at.
_ACTOR_FLAGS = ("load", "save", "ckpt_step", "finetune")


def resolve_roles(run) -> None:
    """Read --megatron-config-path into args.role_overrides: role -> attribute -> value.

    Raises: UserError naming the file, the role and the key.
    """
    from slime.config.validate import refuse_unbuilt

    args = run.args
    args.role_overrides = {role: {} for role in ROLES}
    if args.megatron_config_path is None:
        return
    for role, overrides in _entries(args.megatron_config_path):
        args.role_overrides[role] = _checked(run, role, overrides)
        try:
            refuse_unbuilt(role_args(args, role), set(args.role_overrides[role]))
        except UserError as error:
            raise UserError(f"{_FLAG} {args.megatron_config_path}: {role}: {error}") from None


def role_args(args: argparse.Namespace, role: str) -> argparse.Namespace:
    """The arguments of one role's ranks: a copy with what the role never does and its overrides."""
    own = copy.deepcopy(args)
    for name, value in {**(_CRITIC if role == "critic" else {}), **args.role_overrides[role]}.items():
        setattr(own, name, value)
    return own


def _entries(path: str) -> list[tuple[str, dict[str, Any]]]:
    """(role, overrides) of every entry of the file."""
    entries = read_mapping(path, _FLAG).get("megatron")
    if not isinstance(entries, list):
        raise UserError(f"{_FLAG} {path}: no list under the key megatron; {_SHAPE}")
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        role = entry.get("role") if isinstance(entry, dict) else None
        if role not in ROLES:
            raise UserError(f"{_FLAG} {path}: role {role!r} is not one of {', '.join(ROLES)}; {_SHAPE}")
        if role in found:
            raise UserError(f"{_FLAG} {path}: two entries for the role {role}")
        overrides = entry.get("overrides") or entry.get("args") or {}
        if not isinstance(overrides, dict):
            raise UserError(f"{_FLAG} {path}: {role}: overrides must be a mapping of attributes to values")
        found[role] = {str(key): value for key, value in overrides.items()}
    return list(found.items())


def _checked(run, role: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Values converted as the command line does, without the keys that mean nothing here."""
    file = f"{_FLAG} {run.args.megatron_config_path}: {role}"
    values = {}
    for key, value in overrides.items():
        why = _why_ignored(role, key)
        if why:
            run.notes.append(f"{file}: {key} is ignored: {why}")
            continue
        values[key] = value = _converted(run, file, key, value)
        if key in _COMMON and value != getattr(run.args, key):
            raise UserError(f"{file}: {key} {value}: all roles have the same, {getattr(run.args, key)}")
        if role == "actor" and key in _ACTOR_FLAGS:
            raise UserError(f"{file}: {key}: give it as the flag --{key.replace('_', '-')}")
    if "load" in values and not _holds_weights(values["load"], values.get("ckpt_step")):
        if overrides["load"] != overrides.get("save"):
            raise UserError(f"{file}: load {values['load']}: neither a Hugging Face folder nor a Megatron checkpoint")
        del values["load"]
        run.notes.append(f"{file}: load holds nothing yet: the critic starts from the actor's weights")
    if "load" in values:
        values.setdefault("ckpt_step", None)  # the actor's step says nothing about another folder
    return values


def _why_ignored(role: str, key: str) -> str | None:
    if key in _IGNORED:
        return "roles are placed by --actor-num-nodes, --actor-num-gpus-per-node and --critic-slots"
    if role == "critic" and key == "save":
        return "the critic is saved in the checkpoints of --save"
    return None


def _converted(run, file: str, key: str, value: Any) -> Any:
    """The value as its flag would store it; a key that no flag has is kept as it is and named."""
    parser = standard_parser()[0]
    action = next((action for action in parser._actions if action.dest == key), None)
    if action is None:
        near = difflib.get_close_matches(key, vars(run.args), n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if not hasattr(run.args, key):
            run.notes.append(f"warning: {file}: no flag has the attribute {key}{hint}; it is set all the same")
        return value
    value = convert(parser, action, key, value, file)
    kind = by_dest()[key][0].type if key in by_dest() else None
    if value and kind in ("path", "hook"):
        return absolute(value) if kind == "path" else absolute_hook(value)
    return value


def _holds_weights(folder: str, step: int | None) -> bool:
    return is_hf_folder(folder) or megatron_folder(folder, step) is not None


def old_policy_problems(args: argparse.Namespace) -> Iterator[str]:
    """What is missing where weights change between generation and training: PPO has to say whose log-probs are the old ones.

    Without a word the ratio would be taken to the weights in training, and be 1.
    """
    from slime.config.validate import FULLY_ASYNC

    choices = ["use_rollout_logprobs", "use_tis"]
    mixes_versions = args.rollout_function_path.startswith(FULLY_ASYNC)
    if mixes_versions and args.keep_old_actor:
        yield "--keep-old-actor: samples of the fully asynchronous rollout come from several versions of the weights"
    elif not mixes_versions:
        choices.append("keep_old_actor")
    if args.use_critic and not any(getattr(args, name) for name in choices):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in choices)
        yield f"--advantage-estimator ppo on samples of earlier weights needs one of {flags}: whose log-probs are the old ones"


def problems(args: argparse.Namespace, given: set[str]) -> Iterator[str]:
    """What stands against the roles of a run, the checks of each role's own arguments included."""
    from slime.config.validate import CHECKS, FULLY_ASYNC

    if args.rollout_function_path.startswith(FULLY_ASYNC):
        yield from old_policy_problems(args)
    if args.critic_slots == "own" and not args.use_critic:
        yield "--critic-slots own: there is no critic without --advantage-estimator ppo"
    if args.num_critic_only_steps and not args.use_critic:
        yield f"--num-critic-only-steps {args.num_critic_only_steps}: there is no critic without --advantage-estimator ppo"
    for role, overrides in args.role_overrides.items():
        own = role_args(args, role)
        found = [text for check in CHECKS if check is not problems and overrides for text in check(own, set(overrides))]
        common = [text for check in CHECKS if check is not problems for text in check(args, given)] if found else []
        yield from (f"{_FLAG} {args.megatron_config_path}: {role}: {text}" for text in found if text not in common)
