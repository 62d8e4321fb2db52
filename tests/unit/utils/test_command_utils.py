"""Launch scripts written in Python."""

import json

import pytest

from slime.utils.external_utils import command_utils as U


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train_like.py"
    file.write_text(
        "import json, os, sys, slime\n"
        "open(sys.argv[-1], 'w').write(json.dumps([sys.argv[1:], os.environ['MINE']]))\n"
        "sys.exit('--fail' in sys.argv)\n"
    )
    return str(file)


def test_a_script_gets_the_flags_of_the_model_and_its_own(script, tmp_path):
    began = []
    U.execute_train(
        train_args=f"--lr 1e-6 --rollout-stop 'a b' {tmp_path}/seen.json",
        num_gpus_per_node=8,
        megatron_model_type="qwen3-4B",
        train_script=script,
        before_ray_job_submit=lambda: began.append(1),
        extra_env_vars={"MINE": 3},
    )
    words, mine = json.loads((tmp_path / "seen.json").read_text())
    assert words[:2] == ["--num-layers", "36"] and words[-5:-1] == ["--lr", "1e-6", "--rollout-stop", "a b"]
    assert mine == "3" and began == [1]


def test_failures_are_errors(script, tmp_path):
    with pytest.raises(RuntimeError, match="train_like.py ended with status 1"):
        U.execute_train(f"--fail {tmp_path}/seen.json", train_script=script, extra_env_vars={"MINE": 3})
    with pytest.raises(RuntimeError, match="status 3 of: echo no; exit 3"):
        U.exec_command("echo no; exit 3")
    assert U.exec_command("echo yes", capture_output=True) == "yes\n"


def test_a_checkpoint_is_converted_once(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(U, "exec_command", commands.append)
    for _ in range(2):
        U.convert_checkpoint("M", "qwen3-4B", 1, dir_dst=str(tmp_path), hf_checkpoint="/models/M")
        (tmp_path / "M_torch_dist").mkdir(exist_ok=True)
    assert len(commands) == 1 and f"--hf-checkpoint /models/M --save {tmp_path}/M_torch_dist" in commands[0]
