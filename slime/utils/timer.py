"""Import path of timers for users' functions; the code is in slime.observability.timer."""

from slime.observability.timer import Timer, inverse_timer, timer
