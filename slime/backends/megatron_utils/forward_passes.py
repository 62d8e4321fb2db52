"""Runs a role's forward passes over a round: each puts its weights in place and adds its columns to the data."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from slime.backends.megatron_utils import roles
from slime.backends.megatron_utils.expert_routing import ExpertRouting
from slime.backends.megatron_utils.roles import Pass, TrainRole
from slime.backends.megatron_utils.weight_backup import WeightBackup
from slime.observability.timer import Timers
from slime.utils.hook_calls import call_path


class ForwardPasses:
    """The passes of one rank's model; afterwards the trained weights are in place again."""

    def __init__(
        self, args, role: TrainRole, model: list, backup: WeightBackup, routing: ExpertRouting, timers: Timers
    ):
        self._args, self._role, self._model, self._backup = args, role, model, backup
        self._routing, self._timers = routing, timers

    def run(self, data: dict, batches, old_version: int | None, done: AbstractSet[str] = frozenset()) -> list[str]:
        """Run every pass whose tag is not `done`. Returns the tags of all.

        Args:
            data: the shard; columns are added on the last pipeline stage. old_version: see `MegatronActor.train`.
        """
        old = "actor" if old_version is None or not self._args.keep_old_actor else roles.old_tag(old_version)
        reuses = can_reuse_forward(self._args, len(data["num_microbatches"]))
        planned = roles.passes(self._args, self._role, old, reuses)
        if old not in done:
            self._routing.forget()
        for one in planned:
            if one.tag not in done:
                data.update(self._values(batches) if one is roles.VALUES else self._log_probs(one, batches))
        self._backup.switch("actor")
        return [one.tag for one in planned]

    def _log_probs(self, one: Pass, batches) -> dict:
        from slime.backends.megatron_utils.log_probs import log_prob_pass

        with self._timers(f"{one.prefix}log_probs"):
            self._backup.switch(one.tag)
            hook = self._args.custom_megatron_before_log_prob_hook_path
            if hook is not None:
                call_path(hook, "custom_megatron_before_log_prob_hook_path", self._args, self._model, one.prefix)
            with_entropy = self._args.use_rollout_entropy and not one.prefix
            routing = None if one.prefix else self._routing  # of the old policy, never of frozen weights
            columns = log_prob_pass(self._args, self._model, batches, with_entropy=with_entropy, routing=routing)
        return {f"{one.prefix}{name}": column for name, column in columns.items()}

    def _values(self, batches) -> dict:
        from slime.backends.megatron_utils.log_probs import value_pass

        with self._timers("values"):
            return value_pass(self._args, self._model, batches)


def can_reuse_forward(args, num_steps: int) -> bool:
    """Return whether the old log-probs equal those of the training forward, so that no pass is needed for them."""
    from slime.backends.megatron_utils.hook_results import step_sums_function

    return (
        num_steps == 1
        and args.loss_type == "policy_loss"
        and args.kl_coef == 0
        and not (args.use_rollout_logprobs or args.get_mismatch_metrics or args.use_critic)
        and not (args.keep_old_actor or args.use_opd or args.custom_advantage_function_path or args.use_rollout_entropy)
        and args.advantage_estimator != "gspo"
        and (not args.use_routing_replay or args.use_rollout_routing_replay)
        and step_sums_function(args) is None
    )
