"""The warning when trainer and engine disagree about the probabilities of the same tokens.

It reads the metrics of a round and gives text; where the text goes is the caller's. A round that alarms is always marked in
the metrics (`rollout/train_rollout_alarm`); the text comes with the first and then every REPEAT-th of them.
"""

from __future__ import annotations

from collections.abc import Mapping

REPEAT = 20

CAUSES = (
    "weights that did not arrive: run with --check-weight-update-equal",
    "sampling that changes probabilities: --rollout-top-p, --rollout-top-k, penalties or logit biases",
    "number formats: --precision against --rollout-precision, quantised engine weights",
    "old weights: rounds generated ahead, --update-weights-interval, partial rollouts; the gap then grows with --lr",
    "a custom generate function whose log-probs belong to other tokens",
    "a mixture of experts that routes otherwise in the engine: --use-rollout-routing-replay",
)


class MismatchAlarm:
    """Counts alarming rounds of a run."""

    def __init__(self):
        self._alarms = 0

    def text(self, rollout_id: int, metrics: Mapping[str, float]) -> str | None:
        """Return the warning for a round, None when nothing is to be said."""
        if not metrics.get("rollout/train_rollout_alarm"):
            return None
        self._alarms += 1
        if self._alarms % REPEAT != 1:
            return None
        mean, largest = (metrics[f"rollout/train_rollout_logprob_abs_diff{end}"] for end in ("", "_max"))
        lines = [
            f"WARNING round {rollout_id}: trainer and engine disagree about the sampled tokens: mean log-prob difference "
            f"{mean:.2g} (largest {largest:.2g}), effective sample size {metrics['rollout/train_rollout_ess']:.0%}. Likely causes:",
            *(f"  - {cause}" for cause in CAUSES),
            "  Corrections of the loss: --use-tis. docs/algorithms/mismatch.md explains the numbers; --mismatch-alarm sets the bound",
        ]
        return "\n".join(lines)
