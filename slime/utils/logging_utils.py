"""Import path of logging and tracking for users' functions; the code is in slime.observability.logging_utils."""

from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log
