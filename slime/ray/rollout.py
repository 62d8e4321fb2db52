"""Import path of the metrics of samples for users' log functions; the code is in slime.observability.rollout_metrics."""

from slime.observability.rollout_metrics import sample_metrics as compute_metrics_from_samples
from slime.observability.rollout_metrics import throughput_metrics as compute_perf_metrics_from_samples

__all__ = ["compute_metrics_from_samples", "compute_perf_metrics_from_samples"]
