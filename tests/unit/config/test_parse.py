"""The parser: unknown flags, abbreviations, callers' flags, messages, and what it may import."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from slime.config import UserError, parse_args
from slime.config.parse import parse_raw
from slime.utils.arguments import parse_args as old_import_path


def test_old_import_path_is_the_same_function():
    assert old_import_path is parse_args


def test_callers_flags_may_come_first_as_in_existing_scripts(monkeypatch, make_model, data):
    words = ["--own-flag", "3", "--hf-checkpoint", make_model(), "--prompt-data", data, "--num-rollout", "1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    assert parse_args(lambda parser: parser.add_argument("--own-flag", type=int)).own_flag == 3


def test_unknown_flag_fails_with_the_nearest_match():
    with pytest.raises(UserError, match=r"--rollout-batchsize \(did you mean --rollout-batch-size\?\)"):
        parse_raw(["--rollout-batchsize", "4"])


def test_unknown_flag_written_with_equals_sign_gets_a_suggestion():
    with pytest.raises(UserError, match="did you mean --num-rollout"):
        parse_raw(["--num-rolout=3"])


def test_stray_value_is_named():
    with pytest.raises(UserError, match="unexpected value 7"):
        parse_raw(["--num-rollout", "3", "7"])


def test_allow_unknown_args_turns_unknown_flags_into_a_note():
    args, _, notes = parse_raw(["--allow-unknown-args", "--no-such-thing", "--num-rollout", "3"])
    assert args.num_rollout == 3
    assert "--no-such-thing" in notes[0]


@pytest.mark.parametrize("words", [["--rollout-batch", "4"], ["--sglang-mem-fraction", "0.4"], ["--num-lay", "2"]])
def test_fb_o04_flags_are_never_abbreviated(words):
    with pytest.raises(UserError, match="unknown flag"):
        parse_raw(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-rollout", "many"], "--num-rollout: invalid int value: 'many'"),
        (["--lr", "small"], "--lr: invalid float value: 'small'"),
        (["--kl-loss-type", "k9"], "--kl-loss-type: invalid choice: 'k9'"),
        (["--train-env-vars", "{"], "--train-env-vars.*is not JSON"),
        (["--train-env-vars", "[1]"], "is not a JSON object"),
        (["--num-rollout"], "--num-rollout: expected one argument"),
    ],
)
def test_bad_values_name_flag_and_value(words, message):
    with pytest.raises(ValueError, match=message):
        parse_raw(words)


def test_given_holds_only_what_was_given():
    args, given, _ = parse_raw(["--num-rollout", "3", "--use-kl-loss"])
    assert given == {"num_rollout", "use_kl_loss"}
    assert args.rollout_batch_size == 32


def test_list_defaults_are_not_shared_between_parses():
    first = parse_raw([])[0]
    first.rollout_sample_hook_path.append("x.y")
    assert parse_raw([])[0].rollout_sample_hook_path == []


def test_callers_flags_come_first_and_win_over_the_frameworks():
    def add(parser):
        parser.add_argument("--my-bonus", type=float, default=0.5)
        parser.add_argument("--max-turns", type=str, default="three")
        return parser

    args, given, _ = parse_raw(["--my-bonus", "2"], add)
    assert (args.my_bonus, args.max_turns) == (2.0, "three")
    assert "my_bonus" in given


def test_callers_flag_gets_a_near_match_too():
    def add(parser):
        parser.add_argument("--judge-weight", type=float, default=0.5)

    with pytest.raises(UserError, match="did you mean --judge-weight"):
        parse_raw(["--judge-weigth", "2"], add)


def test_repeated_flags_take_the_last_value_and_hooks_add_up():
    args, _, _ = parse_raw(
        "--num-rollout 1 --num-rollout 2 --rollout-sample-hook-path a.b --rollout-sample-hook-path c.d".split()
    )
    assert args.num_rollout == 2
    assert args.rollout_sample_hook_path == ["a.b", "c.d"]


def test_negative_numbers_are_values():
    assert parse_raw(["--rollout-top-k", "-1", "--log-probs-chunk-size", "-1"])[0].rollout_top_k == -1


def test_log_levels_are_accepted_in_any_case():
    assert parse_raw(["--sglang-log-level", "INFO"])[0].sglang_log_level == "info"


def test_sglang_flags_have_prefixed_attributes():
    args, _, _ = parse_raw(
        "--sglang-mem-fraction-static 0.4 --sglang-context-length 8192 --sglang-attention-backend flashinfer "
        "--sglang-dp-size 2 --sglang-enable-dp-attention --sglang-max-running-requests 64 --sglang-ep-size 2 "
        "--sglang-chunked-prefill-size 4096 --sglang-cuda-graph-max-bs 128 --sglang-cuda-graph-bs 1 2 4 "
        "--sglang-enable-deterministic-inference --sglang-server-concurrency 8 --sglang-tool-call-parser qwen25 "
        "--sglang-reasoning-parser qwen3 --sglang-pp-size 1 --sglang-speculative-algorithm EAGLE".split()
    )
    assert args.sglang_mem_fraction_static == 0.4
    assert args.sglang_context_length == 8192
    assert args.sglang_cuda_graph_bs == [1, 2, 4]
    assert args.sglang_enable_deterministic_inference is True


@pytest.mark.parametrize("name", ["model-path", "trust-remote-code", "tp-size", "port", "random-seed", "node-rank"])
def test_server_arguments_that_the_framework_sets_have_no_flag(name):
    with pytest.raises(UserError, match="unknown flag"):
        parse_raw([f"--sglang-{name}", "1"])


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("[0]*3+[1]*2", [0, 0, 0, 1, 1]), ("[0,1]", [0, 1]), ("([0]+[1])*2", [0, 1, 0, 1])]
)
def test_layer_patterns_are_list_expressions(text, value):
    assert parse_raw(["--moe-layer-freq", text])[0].moe_layer_freq == value


@pytest.mark.parametrize("text", ["__import__('os')", "[1", "a", "[0]*1.5"])
def test_layer_patterns_are_nothing_else(text):
    with pytest.raises(UserError, match="--moe-layer-freq: invalid layer pattern value"):
        parse_raw(["--moe-layer-freq", text])


def test_router_flags_have_the_frameworks_defaults():
    args, _, _ = parse_raw(["--router-policy", "consistent_hashing"])
    assert args.router_policy == "consistent_hashing"
    assert (args.router_log_level, args.router_balance_abs_threshold, args.router_balance_rel_threshold) == (
        "warn",
        10,
        1.2,
    )


def test_user_mistake_on_the_real_command_line_ends_cleanly(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--no-such-flag"])
    with pytest.raises(SystemExit) as end:
        parse_args()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("slime: error: unknown flag --no-such-flag")


def test_wrong_kinds_in_files_end_cleanly_too(make_model, data, tmp_path, monkeypatch, capsys):
    (tmp_path / "eval.yaml").write_text("datasets: {a: {}}\n")
    words = ["--hf-checkpoint", make_model(), "--prompt-data", data, "--eval-config", "eval.yaml"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit):
        parse_args()
    assert "slime: error: --eval-config" in capsys.readouterr().err


FAKE_SGLANG = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        group = parser.add_argument_group("engine")
        parser.add_argument("--model-path", "--model", required=True)
        group.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size", type=int, default=1)
        parser.add_argument("--brand-new-knob", type=int, default=3, choices=[3, 4])
        parser.add_argument("--mem-fraction-static", type=float, default=0.88)
        parser.add_argument("--data-parallel-size", "--dp-size", "-dp", dest="dp_size", type=int, default=1)
        parser.add_argument("--log-level", type=str, default="info")
"""


def test_installed_sglang_brings_its_own_flags(tmp_path):
    package = tmp_path / "fake" / "sglang" / "srt"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "server_args.py").write_text(FAKE_SGLANG)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "fake")!r})
from slime.config import UserError
from slime.config.parse import parse_raw
args = parse_raw("--sglang-brand-new-knob 4 --sglang-dp-size 2 --sglang-log-level INFO".split())[0]
assert (args.sglang_brand_new_knob, args.sglang_dp_size, args.sglang_log_level) == (4, 2, "info")
assert args.sglang_mem_fraction_static == 0.88
assert parse_raw([])[0].sglang_context_length is None
for hidden in ("--sglang-model-path", "--sglang-tp-size"):
    try:
        parse_raw([hidden, "1"])
    except UserError:
        continue
    raise AssertionError(hidden)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_nothing_heavy_is_imported(make_model, data):
    code = f"""
import sys
heavy = ("torch", "megatron", "sglang", "sglang_router", "ray", "transformers", "numpy", "omegaconf")
for name in heavy:
    sys.modules[name] = None
from slime.config import parse_args
args = parse_args(["--hf-checkpoint", {make_model()!r}, "--prompt-data", {data!r}])
assert args.num_layers == 2
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_parsing_takes_well_under_a_second(parse):
    start = time.process_time()
    parse()
    assert time.process_time() - start < 1.0
