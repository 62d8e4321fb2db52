"""The look-ahead loop: rounds are generated ``--async-buffer-size`` ahead of training.

Weights change only between generations, so a round is at most ``async_buffer_size + update_weights_interval - 1`` versions old.
"""

from collections import deque

from slime.cli import run_command
from slime.config import parse_args
from slime.config.validate import fit_to_async_loop
from slime.ray.session import Session


def train(args) -> None:
    fit_to_async_loop(args)
    with Session(args, looks_ahead=True) as run:
        run.update_weights()
        if run.is_eval_only:
            run.evaluate(0)
        rounds, ahead = deque(run.rounds()), deque()
        if rounds and run.eval_due_before(rounds[0]):
            run.evaluate(rounds[0])
        while rounds or ahead:
            while rounds and len(ahead) <= args.async_buffer_size:
                ahead.append(run.begin_generate(rounds.popleft()))
            generation = ahead.popleft()
            rollout_id, batch = generation.rollout_id, run.finish_generate(generation)
            run.train(rollout_id, batch)
            if run.save_due(rollout_id):
                run.save(rollout_id)
            if run.sync_due(rollout_id):
                run.prepare_weights()  # the disk transport: files are written while engines generate
                for generation in ahead:  # no weights change under a running generation
                    run.finish_generate(generation)
                run.update_weights()
            if run.eval_due(rollout_id):
                run.evaluate(rollout_id)
            run.end_round(rollout_id)


if __name__ == "__main__":
    run_command(lambda: train(parse_args()))
