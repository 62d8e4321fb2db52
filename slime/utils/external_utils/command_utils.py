"""Starting runs from Python scripts: `execute_train` is what a launch script of bash does.

The repository's `train.py` runs on this machine, or on the Ray cluster of RAY_ADDRESS; nothing of other runs is touched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

repo_base_dir = str(Path(__file__).resolve().parents[3])


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a command of bash and return what it printed, if that is wanted.

    Raises: RuntimeError with the command and its status.
    """
    print(f"EXEC: {cmd}", flush=True)
    done = subprocess.run(
        ["bash", "-c", cmd], check=False, text=True, stdout=subprocess.PIPE if capture_output else None
    )
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode} of: {cmd}" + (f"\n{done.stdout}" if capture_output else ""))
    return done.stdout


def execute_train(
    train_args: str,
    num_gpus_per_node: int | None = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: dict[str, str] | None = None,
    config=None,
) -> None:
    """Run a training script to its end.

    Args:
        train_args: its flags, as in a shell. num_gpus_per_node: of the cluster; slots follow from the flags here.
        megatron_model_type: name of a file of scripts/models, whose MODEL_ARGS go before the flags; None: without.
        train_script: in the repository, or an absolute path. extra_env_vars: added to the environment.

    Raises: RuntimeError when it fails.
    """
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    script = os.path.join(repo_base_dir, train_script)
    command = f"exec {sys.executable} {script} ${{MODEL_ARGS[@]}} {train_args}"
    if megatron_model_type is not None:
        command = f"source {repo_base_dir}/scripts/models/{megatron_model_type}.sh && {command}"
    env = os.environ | {name: str(value) for name, value in (extra_env_vars or {}).items()}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [repo_base_dir, os.environ.get("PYTHONPATH")]))
    status = subprocess.run(["bash", "-c", command], check=False, env=env).returncode
    if status != 0:
        raise RuntimeError(f"{train_script} ended with status {status}")


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int = 1,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = "/root",
    hf_checkpoint: str | None = None,
) -> None:
    """Make `{dir_dst}/{model_name}_torch_dist` of a Hugging Face folder, unless it is there; the folder itself trains as well."""
    target = f"{dir_dst}/{model_name}_torch_dist"
    if os.path.exists(target):
        print(f"convert_checkpoint: {target} is there already")
        return
    source = hf_checkpoint or f"/root/models/{model_name}"
    models = f"{repo_base_dir}/scripts/models/{megatron_model_type}.sh"
    slime = f"{sys.executable} -c 'from slime.cli import main; main()'"
    tool = f"{slime} convert hf-to-torch-dist --hf-checkpoint {source} --save {target}"
    exec_command(f"cd {repo_base_dir} && source {models} && {tool} ${{MODEL_ARGS[@]}} {extra_args}")


def create_run_id() -> str:
    """A name for a run that no other has."""
    return time.strftime("%y%m%d-%H%M%S") + f"-{uuid.uuid4().hex[:4]}"


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """The W&B flags of a script, where WANDB_API_KEY is set; else none."""
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    group = "_".join(filter(None, [run_name_prefix, Path(test_file).stem, run_id or create_run_id()]))
    return f"--use-wandb --wandb-project slime-{Path(test_file).stem} --wandb-group {group} "
