"""Speed and time of a rank's round: tokens and TFLOP per second, timers, memory. Names are those of `docs/metrics.md`."""

from __future__ import annotations

from slime.backends.megatron_utils.roles import FROZEN_ROLES, TrainRole
from slime.observability.timer import Timers
from slime.utils import device


def metrics(args, role: TrainRole, data: dict, read_tokens: int, timers: Timers) -> dict[str, float]:
    """Return `perf/...` of a round and start the timers anew; a critic's names begin with `perf/critic_`.

    Args:
        read_tokens: that the training pass ran through the model.
    """
    tokens = sum(len(t) for t in data["tokens"])
    steps = f"{role.name}_train"
    seconds = timers.seconds(steps)
    values = {f"perf/{steps}_tok_per_s": tokens / seconds if seconds else 0.0}
    values[f"perf/{steps}_read_tokens"] = float(read_tokens)
    if not (args.share_prompts or args.skip_zero_advantage):  # their work is not that of the samples
        values.update(_tflops(args, steps, data, timers))
    values.update({f"perf/{name}": value for name, value in device.memory_summary().items()})
    values.update(timers.pop_metrics())
    return {_of_role(name, role): value for name, value in values.items()}


def _of_role(name: str, role: TrainRole) -> str:
    prefix = f"perf/{role.time_prefix}"
    return name if name.startswith(prefix) else name.replace("perf/", prefix)


def _tflops(args, steps: str, data: dict, timers: Timers) -> dict[str, float]:
    """Return the TFLOP/s of this rank's passes; a training pass costs three forward passes."""
    from slime.batching.flops import ModelShape, sample_flops

    shape = ModelShape.from_args(args)
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    forward = sum(sample_flops(len(t), shape) for t in data["tokens"]) / ranks / 1e12
    passes = ("values", "log_probs", *(f"{frozen.tag}_log_probs" for frozen in FROZEN_ROLES))
    work = {steps: 3 * forward, **dict.fromkeys(passes, forward)}
    times = {name: timers.seconds(name) for name in work}
    return {f"perf/{name}_tflops": work[name] / times[name] for name in work if times[name] > 0}
