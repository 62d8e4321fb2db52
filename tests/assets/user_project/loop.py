"""A training loop on handles with `.remote`, as scripts for this framework's earlier relatives have it."""

import ray

from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from slime.utils.arguments import parse_args
from slime.utils.logging_utils import configure_logger, finish_tracking, init_tracking, log
from slime.utils.misc import should_run_periodic_action


def main(args):
    configure_logger()
    groups = create_placement_groups(args)
    init_tracking(args)
    rollout, rounds_per_epoch = create_rollout_manager(args, groups["rollout"])
    actor, critic = create_training_models(args, groups, rollout)
    assert critic is None
    actor.update_weights()
    upcoming = rollout.generate.remote(args.start_rollout_id)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        batch = ray.get(upcoming)
        if args.offload_rollout:
            ray.get(rollout.offload.remote())
        ray.get(actor.async_train(rollout_id, batch))
        if should_run_periodic_action(rollout_id, args.save_interval, rounds_per_epoch, args.num_rollout):
            actor.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)
            ray.get(rollout.save.remote(rollout_id))
        actor.clear_memory()
        actor.update_weights()
        if should_run_periodic_action(rollout_id, args.eval_interval, rounds_per_epoch):
            ray.get(rollout.eval.remote(rollout_id))
        log(args, {"loop/rounds": rollout_id + 1, "rollout/step": rollout_id}, step_key="rollout/step")
        if rollout_id + 1 < args.num_rollout:
            upcoming = rollout.generate.remote(rollout_id + 1)
    ray.get(rollout.dispose.remote())
    finish_tracking(args)


if __name__ == "__main__":
    main(parse_args())
