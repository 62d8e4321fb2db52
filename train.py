"""The synchronous loop: generate, train, send the new weights to the engines, again.

source scripts/models/qwen3-4B.sh
python train.py --prompt-data data.jsonl --hf-checkpoint MODEL ${MODEL_ARGS[@]} ...
"""

from slime.cli import run_command
from slime.config import parse_args
from slime.ray.session import Session


def train(args) -> None:
    with Session(args) as run:
        run.update_weights()  # engines start from the trainer's weights, whatever they loaded
        if run.is_eval_only:
            run.evaluate(0)
        for rollout_id in run.rounds():
            if run.eval_due_before(rollout_id):
                run.evaluate(rollout_id)
            batch = run.generate(rollout_id)  # prompts -> engines -> rewards -> one shard per data-parallel rank
            run.hand_over_to_trainer(rollout_id)  # shared slots: engines release their memory, the trainer wakes up
            run.train(rollout_id, batch)  # reference log-probs, advantages, optimizer steps
            if run.save_due(rollout_id):
                run.save(rollout_id)
            run.hand_over_to_engines(rollout_id)  # shared slots: the trainer sleeps, engines take their weights back
            if run.sync_due(rollout_id):
                run.update_weights()  # pause -> flush -> buckets -> continue
            if run.eval_due(rollout_id):
                run.evaluate(rollout_id)
            run.end_round(rollout_id)


if __name__ == "__main__":
    run_command(lambda: train(parse_args()))
