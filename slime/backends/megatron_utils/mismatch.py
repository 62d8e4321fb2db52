"""The mismatch of trainer and engine in one round, over all data ranks, and whether it is alarming.

Measured on the weights that training started from: the old log-probs of the round, or, where no pass was needed for them, those
of its first step's forward. `slime.algorithms.mismatch` has the formulas.
"""

from __future__ import annotations

import torch

from slime.algorithms import mismatch
from slime.backends.megatron_utils.metrics import sum_over_data_ranks
from slime.utils import device

STRICT, LOOSE = 1e-3, 0.1


def mismatch_metrics(args, data: dict, first_step: dict[int, torch.Tensor]) -> dict[str, float]:
    """Return `rollout/train_rollout_<name>` and `rollout/train_rollout_alarm`; {} without log-probs of the engine.

    Collective over the data ranks of the last stage.

    Args:
        first_step: log-probs [L_i] of the forward pass of the round's first step, by position in the shard.
    """
    if "rollout_log_probs" not in data:
        return {}
    trained = dict(enumerate(data["log_probs"])) if "log_probs" in data else first_step
    columns = [[data[key][i] for i in trained] for key in ("rollout_log_probs", "loss_masks")]
    sums, largest = mismatch.mismatch_sums(list(trained.values()), *columns)
    report = mismatch.mismatch_report(sum_over_data_ranks(sums), _max_over_data_ranks(largest))
    if report:
        report[f"{mismatch.PREFIX}alarm"] = float(mismatch.is_alarming(report, alarm_threshold(args)))
    return {f"rollout/{name}": value for name, value in report.items()}


def alarm_threshold(args) -> float:
    """Return `--mismatch-alarm`, or what fits the run: strict where both sides do the same arithmetic on the same weights."""
    if args.mismatch_alarm is not None:
        return args.mismatch_alarm
    same_arithmetic = args.precision == args.rollout_precision == "fp32"
    return STRICT if same_arithmetic and args.update_weights_interval == 1 else LOOSE


def _max_over_data_ranks(value: float) -> float:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    group = mpu.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device.device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.item()
