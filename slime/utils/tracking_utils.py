"""Import path of tracking for users' functions; the code is in slime.observability.logging_utils."""

from slime.observability.logging_utils import finish_tracking, init_tracking, log
