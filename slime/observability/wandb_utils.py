"""Weights & Biases: the run's metrics as one W&B run, written by the driver.

Invariants: the wandb package is imported only when --use-wandb is given; the API key goes to the settings of `wandb.init` and
nowhere else; a run that continues in the same run directory continues its W&B run; opening and closing have deadlines, and a
server that is away never stops training. It does not know what the metrics mean: only that a prefix has a step axis.
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

    Raises: RuntimeError naming the flag when the package is missing or no run can be opened.
    """

    def __init__(self, args, config: dict[str, Any]):
        if not is_wandb_available():
            raise RuntimeError("--use-wandb needs the wandb package: pip install 'slime[wandb]'")
        import wandb

        self._has_warned = False
        mode = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        try:
            self._run = wandb.init(**run_options(args, mode, config), settings=_settings(wandb, args, mode))
        except Exception as error:
            raise RuntimeError(
                f"--use-wandb: no run could be opened (mode {mode}): {error}. --wandb-mode offline needs no server; "
                "--wandb-key and --wandb-host say where and as whom to log in"
            ) from error
        for step_key, names in STEP_AXES.items():
            self._run.define_metric(step_key)
            for name in names:
                self._run.define_metric(name, step_metric=step_key)

    def log(self, data: dict[str, float], step_key: str, step: int) -> None:
        """Write the numbers of `data` at `step` of the axis `step_key`; what W&B does not take is in metrics.jsonl."""
        try:
            self._run.log({**data, step_key: step})
        except Exception as error:
            if not self._has_warned:
                logger.warning("Weights & Biases takes no metrics any more: %s; training goes on without it", error)
            self._has_warned = True

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
        "resume": "allow",
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
