"""Weights & Biases: the run's metrics as one W&B run, written by the driver.

Invariants: the wandb package is imported only when --use-wandb is given; the API key goes to the settings of `wandb.init` and
nowhere else; a run that continues in the same run directory continues its W&B run; opening and closing have deadlines, and a
server that goes away never stops training. Line N of metrics.jsonl is W&B's own step N, so that both know the same moments, unless
somebody else logs into the run. It does not know what the metrics mean: only that a prefix has a step axis.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 90.0
FINISH_TIMEOUT_S = 60.0
RUN_ID_FILE = "wandb_run_id.txt"

STEP_AXES = {
    "train/step": ("train/*",),
    "rollout/step": (
        *("rollout/*", "perf/*", "passrate/*", "multi_turn/*", "data/*", "correct_length/*"),
        "correct_entropy",
    ),
    "eval/step": ("eval/*",),
}


def is_wandb_available() -> bool:
    """Tell whether the wandb package is installed."""
    return importlib.util.find_spec("wandb") is not None


class WandbAdapter:
    """One W&B run. `config` are the flags that W&B shows beside the curves.

    Args:
        num_lines: lines of metrics.jsonl so far; with some, the run is being continued and goes on without a server.
    Raises: RuntimeError naming the flag when the package is missing or no run can be opened.
    """

    def __init__(self, args, config: dict[str, Any], num_lines: int = 0):
        if not is_wandb_available():
            raise RuntimeError("--use-wandb needs the wandb package: pip install 'slime[wandb]'")
        import wandb

        self._wandb, self._args, self._config = wandb, args, config
        self._has_warned, self._is_continued = False, num_lines > 0
        self._mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        self._open(num_lines)

    def _open(self, next_line: int, **moment: str) -> None:
        """Open the run, where it ended or at another `moment` of it; a continued one offline where no server lets it in."""
        try:
            self._run = self._init(moment or {"resume": "allow"})
        except Exception as error:
            self._wandb.teardown()  # its process would still call the run in use
            if moment:
                raise
            hint = "--wandb-key and --wandb-host say where and as whom to log in"
            if not self._is_continued or self._mode == "offline":
                raise RuntimeError(
                    f"--use-wandb: no run could be opened (mode {self._mode}): {error}. --wandb-mode offline needs no server; {hint}"
                ) from error
            logger.warning("Weights & Biases lets nobody in: %s; going on in local files. %s", error, hint)
            self._mode = "offline"
            self._run = self._init({"resume": "allow"})
        self._go_on_from(next_line)
        for step_key, names in STEP_AXES.items():
            self._run.define_metric(step_key)
            for name in names:
                self._run.define_metric(name, step_metric=step_key)

    def _go_on_from(self, line: int) -> None:
        """Have this line come behind everything that W&B holds: it drops what comes before."""
        self._skipped = max(0, self._run.starting_step - line)

    def _init(self, moment: dict[str, str]):
        options = run_options(self._args, self._mode, self._config) | moment
        return self._wandb.init(**options, settings=_settings(self._wandb, self._args, self._mode))

    def log(self, data: dict[str, float], step_key: str, step: int, line: int) -> None:
        """Write the numbers of `data` at `step` of the axis `step_key`; what W&B does not take is in metrics.jsonl.

        Args:
            line: its number in metrics.jsonl.
        """
        try:
            # A loop of the user's may log into the run as well.
            self._skipped = max(self._skipped, self._run.step - line)
            self._run.log({**data, step_key: step}, step=line + self._skipped, commit=True)
        except Exception as error:
            if not self._has_warned:
                logger.warning("Weights & Biases takes no metrics any more: %s; training goes on without it", error)
            self._has_warned = True

    def rewind(self, first: int, num_kept: int) -> int:
        """Forget the run from line `first` on, because its round is done again; without any line left, begin a new run.

        A server that does not rewind (W&B has it in preview) and offline files keep what they have, and the log says so.

        Returns: the line of the `num_kept` ones to go on from: they have to be logged again from there.
        """
        if first == 0 and self._args.wandb_run_id is None:
            self.close()
            (Path(self._args.run_dir) / RUN_ID_FILE).unlink(missing_ok=True)
            self._open(0)
            return 0
        why = self._why_not_rewound(first, num_kept)
        if why is None:
            return first
        if why:
            logger.warning(
                "Weights & Biases shows the rounds that are done again twice: %s. metrics.jsonl and TensorBoard have each once",
                why,
            )
        self._go_on_from(num_kept)
        return num_kept

    def _why_not_rewound(self, first: int, num_kept: int) -> str | None:
        """Rewind. Returns None when that was done, otherwise the reason, empty where W&B has nothing of those rounds."""
        if self._mode == "offline":
            return "offline files cannot be rewound"
        if self._run.starting_step <= first:
            return ""
        if self._skipped:
            return "it holds more than this run has logged"
        if first == 0:
            return "a run of --wandb-run-id keeps its first line"
        self.close()
        try:
            self._open(first, resume_from=f"{_run_id(self._args)}?_step={first - 1}")
        except Exception as error:
            self._open(num_kept)
            return str(error)
        return None

    def close(self) -> None:
        """Hand over what is left, for at most FINISH_TIMEOUT_S; what did not arrive stays in W&B's local files."""
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("Weights & Biases did not close cleanly: %s; `wandb sync` can upload the local files", error)


def run_options(args, mode: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what `wandb.init` is told: identity, folder and mode."""
    return {
        "entity": args.wandb_team,
        "project": args.wandb_project,
        "group": _group(args),
        "name": args.run_name,
        "id": _run_id(args),
        "dir": _made(args.wandb_dir or args.run_dir),
        "mode": mode,
        "config": config,
    }


def _group(args) -> str | None:
    """Return --wandb-group with the run's id behind it, so that runs of one script differ; bare when told so."""
    if args.wandb_group and args.wandb_random_suffix:
        return f"{args.wandb_group}_{_run_id(args)}"
    return args.wandb_group


def _run_id(args) -> str:
    """Return --wandb-run-id, else the id that this run directory had before, else a new one, which is kept there."""
    if args.wandb_run_id:
        return args.wandb_run_id
    path = Path(args.run_dir) / RUN_ID_FILE
    if not path.exists():
        path.write_text(os.urandom(4).hex() + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _made(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return str(folder)


def _settings(wandb, args, mode: str):
    """Return settings that leave the console alone and bound every wait; those that this version lacks are left out.

    The key stands here because `wandb.login` would write it to ~/.netrc.
    """
    wanted = {
        "console": "off",
        "silent": True,
        "disable_git": True,
        "init_timeout": INIT_TIMEOUT_S,
        "finish_timeout": FINISH_TIMEOUT_S,
        "finish_timeout_raises": True,
    }
    if args.wandb_host:
        wanted["base_url"] = args.wandb_host
    if args.wandb_key and mode == "online":
        wanted["api_key"] = args.wandb_key
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in wandb.Settings.model_fields})
