"""What is said about a round and an evaluation.

--custom-rollout-log-function-path examples/hooks/log_functions.py:log_rollout
--custom-eval-rollout-log-function-path examples/hooks/log_functions.py:log_eval
"""

import os


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """Keep one sample of each round to read. Return True to leave out the built-in metrics."""
    best = max(samples, key=lambda sample: sample.get_reward_value(args))
    with open(os.path.join(args.run_dir, "best.txt"), "a", encoding="utf-8") as file:
        file.write(f"round {rollout_id} ({rollout_time:.1f} s): {best.prompt!r} -> {best.response!r}\n")
    return False


def log_eval(rollout_id, args, data, extra_metrics):
    """`data` holds rewards, truncated and samples per set."""
    for name, result in data.items():
        print(f"round {rollout_id}: {len(result['rewards'])} answers of {name}")
    return False
