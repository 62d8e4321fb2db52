"""Old import path of the data-parallel schedule; the code is in `slime.batching.schedule`."""

from slime.batching.schedule import DpSchedule, build_dp_schedule, first_fit

__all__ = ["DpSchedule", "build_dp_schedule", "first_fit"]
