"""What a person sees while a run goes on: start notes, a live line, one summary line per round.

Invariants: on a terminal one line at the bottom is redrawn; elsewhere a plain line appears at most every 10 s. It writes
text only and does not know how rounds are made or where progress comes from.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

LOG_INTERVAL_S = 10.0

#: (metric, text before the value, format) of the summary line, in this order; absent metrics are left out.
SUMMARY = (
    ("rollout/raw_reward", "reward", "{:.3f}"),
    ("rollout/response_len/mean", "len", "{:.0f}"),
    ("rollout/truncated_ratio", "truncated", "{:.0%}"),
    ("train/loss", "loss", "{:.4f}"),
    ("train/ppo_kl", "kl", "{:.2e}"),
    ("train/grad_norm", "grad", "{:.3f}"),
    ("train/train_rollout_logprob_abs_diff", "logprob gap", "{:.1e}"),
    ("perf/rollout_time", "rollout", "{:.1f}s"),
    ("perf/offload_wall_time", "offload", "{:.1f}s"),
    ("perf/train_wall_time", "train", "{:.1f}s"),
    ("perf/sync_wall_time", "sync", "{:.1f}s"),
)


class Console:
    """The text side of one run.

    Args:
        num_rounds: how many rounds the run has, None when nobody knows.
        file: where text goes, standard error when None.
        is_live: redraw one line; None asks the file whether it is a terminal.
    """

    def __init__(
        self,
        num_rounds: int | None = None,
        *,
        file=None,
        is_live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        from rich.console import Console as RichConsole

        self.num_rounds = num_rounds
        self._rich = RichConsole(file=file or sys.stderr, force_terminal=is_live, highlight=False, soft_wrap=True)
        self._is_live = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._clock = clock
        self._lock = threading.RLock()
        self._live = None
        self._round: int | None = None
        self._phase = "starting"
        self._phase_began = self._logged_at = clock()

    def start(self, notes: Sequence[str], run_dir: str) -> None:
        """Say what was decided for the user, and where the run's files lie."""
        self._print(f"run directory: {run_dir}")
        for note in notes:
            self._print(f"  note: {note}")

    def say(self, text: str) -> None:
        """Write one line that stays."""
        with self._lock:
            self._print(text)

    def begin(self, phase: str, rollout_id: int | None = None) -> None:
        """Enter a phase ("generate", "train", "update_weights", "save", "eval") of a round."""
        with self._lock:
            if rollout_id is not None:
                self._round = rollout_id
            self._phase = phase
            self._phase_began = self._clock()
            if self._is_live:
                self._draw({})

    def update(self, snapshot: Mapping) -> None:
        """Show a `Progress.snapshot()`: at once on a terminal, else when the last line is 10 s old."""
        with self._lock:
            if self._is_live:
                self._draw(snapshot)
            elif self._clock() - self._logged_at >= LOG_INTERVAL_S:
                self._logged_at = self._clock()
                self._print(self.line(snapshot))

    def round_summary(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Write the one line that stays of a round."""
        parts = [f"{label} {form.format(metrics[key])}" for key, label, form in SUMMARY if key in metrics]
        parts += [f"{key} {value:.3f}" for key, value in metrics.items() if _is_eval_score(key)]
        with self._lock:
            self._logged_at = self._clock()
            self._print(f"{self._round_text(rollout_id)}  " + "  ".join(parts))

    def stop_live(self) -> None:
        """Take the live line away; safe to call twice."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def line(self, snapshot: Mapping) -> str:
        """Return the progress line for a snapshot, seen from the current phase."""
        phase = self._progress_of(snapshot)
        parts = [self._round_text(self._round), self._phase]
        if phase is not None:
            total = phase["total"]
            parts.append(f"{phase['done']}/{total}" if total is not None else f"{phase['done']} done")
            parts += _rates(phase)
        parts.append(f"{self._clock() - self._phase_began:.0f}s")
        return "  ".join(part for part in parts if part)

    def _progress_of(self, snapshot: Mapping) -> Mapping | None:
        """Return the counts of the current phase; between phases that nobody counts, nothing."""
        return (snapshot.get("phases") or {}).get(self._phase)

    def _round_text(self, rollout_id: int | None) -> str:
        if rollout_id is None:
            return ""
        return f"round {rollout_id + 1}" + (f"/{self.num_rounds}" if self.num_rounds else "")

    def _draw(self, snapshot: Mapping) -> None:
        from rich.live import Live
        from rich.text import Text

        text = Text(self.line(snapshot), style="cyan", no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(text, console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(text, refresh=True)

    def _print(self, text: str) -> None:
        self._rich.print(text, markup=False)


def _rates(phase: Mapping) -> list[str]:
    """Return tokens per second and the mean reward so far, as far as the counters tell."""
    counters, elapsed_s = phase["counters"], phase["elapsed_s"]
    parts = []
    if counters.get("tokens") and elapsed_s > 0:
        parts.append(f"{counters['tokens'] / elapsed_s:.0f} tok/s")
    if counters.get("rewards"):
        parts.append(f"reward {counters.get('reward_sum', 0.0) / counters['rewards']:.3f}")
    return parts


def _is_eval_score(name: str) -> bool:
    """Tell the mean reward of a data set (`eval/aime`) from the metrics around it."""
    return (
        name.startswith("eval/")
        and "/" not in name[5:]
        and not name.endswith(("_ratio", "/step"))
        and "-pass@" not in name
    )
