"""--config and --custom-config-path."""

from __future__ import annotations

import pytest

from slime.config import UserError
from slime.config.parse import parse_raw


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "run.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write_file


def test_command_line_wins_over_file_and_file_over_default(write):
    path = write("rollout-batch-size: 4\nnum_rollout: 7\n")
    args, given, _ = parse_raw(["--config", path, "--num-rollout", "9"])
    assert (args.rollout_batch_size, args.num_rollout, args.n_samples_per_prompt) == (4, 9, 1)
    assert {"rollout_batch_size", "num_rollout"} <= given


def test_flags_of_every_family_may_stand_in_the_file(write):
    path = write("num-layers: 2\nsglang-mem-fraction-static: 0.4\nrouter_policy: random\nrollout_stop: [a, b]\n")
    args, _, _ = parse_raw(["--config", path])
    assert (args.num_layers, args.sglang_mem_fraction_static, args.router_policy) == (2, 0.4, "random")
    assert args.rollout_stop == ["a", "b"]


def test_numbers_that_yaml_reads_as_text_become_numbers(write):
    args, _, _ = parse_raw(["--config", write("lr: 1e-5\n")])
    assert args.lr == 1e-5


@pytest.mark.parametrize(
    ("line", "dest", "value"),
    [
        ("use-kl-loss: true", "use_kl_loss", True),
        ("use_kl_loss: false", "use_kl_loss", False),
        ("disable-grpo-std-normalization: true", "grpo_std_normalization", False),
        ("disable-grpo-std-normalization: false", "grpo_std_normalization", True),
        ("grpo_std_normalization: false", "grpo_std_normalization", False),
        ("use_tensorboard: false", "use_tensorboard", False),
        ("train-env-vars: {A: '1'}", "train_env_vars", {"A": "1"}),
        ("max_turns: null", "max_turns", None),
        ("eval-prompt-data: [a, p, b, q]", "eval_prompt_data", [["a", "p", "b", "q"]]),
        ("eval-prompt-data: [[a, p], [b, q]]", "eval_prompt_data", [["a", "p"], ["b", "q"]]),
    ],
)
def test_yaml_values_become_what_the_flag_would_store(write, line, dest, value):
    args, _, _ = parse_raw(["--config", write(line + "\n")])
    assert getattr(args, dest) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout-batchsize: 4", "unknown key rollout-batchsize .did you mean rollout_batch_size"),
        ("num_rollout: many", "num_rollout: invalid int value: 'many'"),
        ("num_rollout: 1.5", "num_rollout: invalid int value: '1.5'"),
        ("num_rollout: [1, 2]", "num_rollout: expected one value"),
        ("use_kl_loss: 3", "use_kl_loss: expected true or false, got 3"),
        ("kl_loss_type: k9", "'k9' is not one of k1"),
        ("- a\n- b", "expected a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_name_file_key_and_value(write, text, message):
    path = write(text)
    with pytest.raises(UserError, match=message) as error:
        parse_raw(["--config", path])
    assert path in str(error.value)


def test_missing_file_is_named():
    with pytest.raises(UserError, match="--config nowhere.yaml: cannot be read"):
        parse_raw(["--config", "nowhere.yaml"])


def test_custom_config_wins_over_the_command_line_and_is_checked_after(parse, write):
    path = write("rollout_batch_size: 2\nn_samples_per_prompt: 4\nlr: 1e-4\n", "custom.yaml")
    args = parse("--custom-config-path", path, "--rollout-batch-size", "64")
    assert (args.rollout_batch_size, args.global_batch_size, args.lr) == (2, 8, 1e-4)


def test_custom_config_keeps_unknown_keys_and_says_so(parse, write):
    args = parse("--custom-config-path", write("tool_budget: 3\n", "custom.yaml"))
    assert args.tool_budget == 3
    assert any("tool_budget" in note for note in args.start_notes)
