"""Import path of metrics of users' log functions; the code is in slime.observability.metric_utils."""

from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)
