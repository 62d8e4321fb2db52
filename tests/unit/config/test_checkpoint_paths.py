"""Where weights come from and go to, and continuing a run."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from slime.config import UserError, checkpoint_dirs, parse_args

TINY = json.loads((Path(__file__).resolve().parents[2] / "assets/config/tiny-qwen3/config.json").read_text())


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(name: str = "ckpt", iteration: int = 7, manifest: bool = True, **changes) -> str:
        directory = tmp_path / name / f"iter_{iteration:07d}"
        directory.mkdir(parents=True)
        (directory / "metadata.json").write_text("{}")
        if manifest:
            fields = {
                "format": checkpoint_dirs.FORMAT,
                "rollout_id": iteration,
                "weight_version": iteration + 1,
                "run_id": "abc",
                "sequence": iteration + 1,
                "started_from": None,
                "precision": "fp32",
                "model": checkpoint_dirs.model_shape(TINY),
                "files": {"metadata.json": 2},
            }
            (directory / "manifest.json").write_text(json.dumps(fields | changes))
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
        return str(tmp_path / name)

    return make


def said(args, text: str) -> bool:
    return any(text in note for note in args.start_notes)


def test_only_a_committed_iteration_is_complete(make_checkpoint, tmp_path):
    assert checkpoint_dirs.latest(make_checkpoint("whole")).rollout_id == 7
    assert checkpoint_dirs.latest(make_checkpoint("half", manifest=False)) is None
    assert checkpoint_dirs.latest(str(tmp_path / "nowhere")) is None
    assert checkpoint_dirs.latest(None) is None


def test_tracker_decides_and_later_rounds_of_an_older_history_do_not_win(make_checkpoint):
    make_checkpoint(iteration=20, sequence=4)
    folder = make_checkpoint(iteration=10, sequence=5)
    assert checkpoint_dirs.latest(folder).rollout_id == 10


def test_without_a_usable_tracker_the_last_one_saved_counts(make_checkpoint, caplog):
    make_checkpoint(iteration=20, sequence=4)
    folder = make_checkpoint(iteration=10, sequence=5)
    (Path(folder) / checkpoint_dirs.TRACKER).write_text("30")
    with caplog.at_level(logging.WARNING):
        assert checkpoint_dirs.latest(folder).rollout_id == 10
    assert "names 30, which is not there" in caplog.text


def test_damaged_checkpoint_is_an_error_that_names_the_file(parse, make_checkpoint):
    folder = make_checkpoint()
    (Path(folder) / "iter_0000007" / "metadata.json").write_text("{ cut")
    with pytest.raises(UserError, match="metadata.json has 5 bytes instead of 2.*Remove the directory"):
        parse("--save", folder)


def test_checkpoint_of_another_version_is_an_error(parse, make_checkpoint):
    with pytest.raises(UserError, match="has format 1, this version reads 2"):
        parse("--save", make_checkpoint(format=1))


def test_checkpoint_of_another_model_or_precision_is_an_error(parse, make_checkpoint):
    folder = make_checkpoint(model=checkpoint_dirs.model_shape(TINY) | {"hidden_size": 4096})
    with pytest.raises(UserError, match="another model than --hf-checkpoint .*: hidden_size 4096 there, "):
        parse("--save", folder)
    with pytest.raises(UserError, match="trained with --precision fp32, this run has bf16"):
        parse("--save", make_checkpoint("other"), "--precision", "bf16")


def test_without_load_the_model_folder_is_the_start_point(parse):
    args = parse()
    assert args.load == args.hf_checkpoint
    assert (args.start_rollout_id, args.finetune, args.no_load_optim, args.no_load_rng) == (0, True, True, True)


def test_reference_folder_is_the_start_point_when_load_is_absent(parse, make_model):
    other = make_model("other")
    assert parse("--ref-load", other).load == other


def test_interrupted_run_continues_from_save(parse, make_checkpoint):
    folder = make_checkpoint()
    args = parse("--save", folder, "--save-interval", "5")
    assert args.load == folder
    assert (args.start_rollout_id, args.finetune, args.no_load_optim) == (None, False, False)
    assert args.resume_from == f"{folder}/iter_0000007" and args.run_id == "abc"
    assert said(args, f"continuing from {folder}/iter_0000007") and said(args, "round 7 is trained")


def test_named_run_continues_from_its_own_folder(parse, make_checkpoint):
    folder = make_checkpoint("outputs/first/checkpoints")
    args = parse("--run-name", "first", "--save-interval", "5")
    assert args.load == args.save == folder


def test_named_run_continues_also_when_saving_was_not_asked_for_again(parse, make_checkpoint):
    folder = make_checkpoint("outputs/first/checkpoints")
    args = parse("--run-name", "first")
    assert args.load == args.save == folder and said(args, "the earlier run of this name")
    assert parse("--run-name", "second").save is None


def test_half_written_checkpoint_is_ignored_with_a_warning(parse, make_checkpoint):
    folder = Path(make_checkpoint())
    (folder / "iter_0000009.partial-0a1b2c3d").mkdir()
    args = parse("--save", str(folder))
    assert args.resume_from == str(folder / "iter_0000007")
    assert said(args, "iter_0000009.partial-0a1b2c3d was cut short and is ignored")
    shutil.rmtree(folder / "iter_0000007")
    args = parse("--save", str(folder))
    assert args.resume_from is None and args.load == parse().load
    assert said(args, "iter_0000009.partial-0a1b2c3d was cut short and is ignored")


def test_same_command_with_load_starts_and_then_continues(parse, make_checkpoint, make_model):
    start = make_model("start")
    command = ("--load", start, "--save", "ckpt", "--no-load-rng", "--use-kl-loss")
    first = parse(*command)
    assert first.load == start and first.resume_from is None and first.started_from == start
    folder = make_checkpoint(started_from=start)
    again = parse(*command)
    assert again.resume_from == f"{folder}/iter_0000007" and again.started_from == start
    assert (again.finetune, again.no_load_optim, again.no_load_rng) == (False, False, False)
    assert again.ref_load == start  # the initial actor still


def test_same_command_that_branches_from_another_run_continues_its_own(parse, make_checkpoint):
    old = make_checkpoint("old", 3)
    command = ("--load", old, "--save", "new")
    first = parse(*command)
    assert first.resume_from == f"{old}/iter_0000003" and first.started_from == old
    new = make_checkpoint("new", 9, started_from=old)
    assert parse(*command).resume_from == f"{new}/iter_0000009"


def test_fb_a11_explicit_start_round_is_kept(parse, make_checkpoint):
    assert parse("--save", make_checkpoint(iteration=5), "--start-rollout-id", "7").start_rollout_id == 7


def test_step_chooses_an_earlier_checkpoint(parse, make_checkpoint):
    make_checkpoint(iteration=3)
    folder = make_checkpoint(iteration=7)
    assert parse("--save", folder, "--ckpt-step", "3").resume_from == f"{folder}/iter_0000003"
    assert parse("--load", folder, "--ckpt-step", "3").resume_from == f"{folder}/iter_0000003"
    with pytest.raises(UserError, match="--ckpt-step 4: .* holds no complete checkpoint of that round"):
        parse("--load", folder, "--ckpt-step", "4")


def test_no_resume_starts_over_beside_the_old_checkpoints(parse, make_checkpoint):
    folder = make_checkpoint()
    args = parse("--save", folder, "--no-resume")
    assert args.save.startswith(folder + "-") and args.save != folder
    assert args.load == args.hf_checkpoint
    assert said(args, "an earlier run's checkpoints stay")


def test_load_of_a_checkpoint_is_kept(parse, make_checkpoint):
    folder = make_checkpoint()
    args = parse("--load", folder)
    assert args.load == folder and args.finetune is False


def test_finetune_takes_only_the_weights_of_a_checkpoint(parse, make_checkpoint):
    args = parse("--load", make_checkpoint(), "--finetune", "--precision", "bf16")
    assert (args.no_load_optim, args.no_load_rng, args.start_rollout_id) == (True, True, 0)
    assert args.resume_from is None and args.run_id != "abc" and said(args, "starting at round 0 from the weights in")


def test_save_folder_with_an_earlier_run_is_said(parse, make_checkpoint):
    args = parse("--load", make_checkpoint("old"), "--save", make_checkpoint("new", 9))
    assert said(args, "holds checkpoints of an earlier run")


def test_load_that_will_be_written_later_falls_back(parse, tmp_path):
    args = parse("--load", "ckpt", "--save", "ckpt")
    assert args.load == args.hf_checkpoint
    assert said(args, f"--load {tmp_path / 'ckpt'} holds no checkpoint yet")


def test_load_of_nothing_is_an_error(parse, tmp_path):
    with pytest.raises(UserError, match=f"--load {tmp_path / 'nowhere'}: neither a Hugging Face folder"):
        parse("--load", "nowhere")


def test_plain_megatron_folder_gives_weights(parse, make_checkpoint):
    folder = make_checkpoint(manifest=False)
    args = parse("--load", folder)
    assert args.load == folder and args.resume_from is None and args.no_load_optim and args.start_rollout_id == 0
    assert parse("--use-kl-loss", "--ref-load", folder).ref_load == folder


def test_fb_o07_save_interval_without_save_uses_the_run_folder(parse, tmp_path):
    args = parse("--save-interval", "5", "--run-name", "first")
    assert args.save == str(tmp_path / "outputs" / "first" / "checkpoints")
    assert said(args, "checkpoints go to")
    assert parse("--save-hf", "export/{rollout_id}", "--run-name", "first").save == args.save


def test_save_without_interval_is_one_checkpoint_at_the_end(parse):
    args = parse("--save", "ckpt")
    assert args.save_interval is None and said(args, "one checkpoint, after the last round")


def test_number_of_kept_checkpoints_is_checked(parse):
    with pytest.raises(UserError, match="--save-keep-last 0: must be above 0"):
        parse("--save", "ckpt", "--save-keep-last", "0")


def test_model_folder_is_found_from_load_or_ref_load(make_model, data):
    model = make_model()
    for flag in ("--load", "--ref-load"):
        assert parse_args([flag, model, "--prompt-data", data]).hf_checkpoint == model


def test_no_model_at_all_names_the_flag(data):
    with pytest.raises(UserError, match="--hf-checkpoint is missing"):
        parse_args(["--prompt-data", data])


@pytest.mark.parametrize("flags", ["--use-kl-loss", "--kl-coef 0.1"])
def test_reference_is_the_initial_actor_when_not_given(parse, flags, make_model):
    args = parse(*flags.split())
    assert args.ref_load == args.hf_checkpoint and said(args, "reference of the KL term is the initial actor")
    start = make_model("start")
    assert parse(*flags.split(), "--load", start).ref_load == start


def test_reference_of_a_continued_run_is_still_the_initial_actor(parse, make_checkpoint):
    args = parse("--use-kl-loss", "--load", make_checkpoint())
    assert args.ref_load == args.hf_checkpoint


def test_no_reference_without_a_kl_term(parse):
    assert parse().ref_load is None


def test_missing_reference_is_an_error(parse, tmp_path):
    with pytest.raises(UserError, match=f"--ref-load {tmp_path / 'nowhere'}"):
        parse("--use-kl-loss", "--ref-load", "nowhere")


def test_export_may_not_overwrite_the_model(parse):
    model = parse().hf_checkpoint
    with pytest.raises(UserError, match="--save-hf .* would overwrite the model"):
        parse("--save-hf", model)


def test_ppo_goes_on_only_from_a_checkpoint_that_holds_its_critic(parse, make_checkpoint):
    folder = make_checkpoint()
    with pytest.raises(UserError, match="iter_0000007 holds no critic, so it cannot be continued.*--finetune"):
        parse("--advantage-estimator", "ppo", "--save", folder)
    assert parse("--advantage-estimator", "ppo", "--load", folder, "--finetune").start_rollout_id == 0
    critic = Path(folder) / "iter_0000007" / "critic"
    critic.mkdir()
    (critic / "metadata.json").write_text("{}")
    assert parse("--advantage-estimator", "ppo", "--save", folder).resume_from.endswith("iter_0000007")
    assert parse("--save", folder).resume_from.endswith("iter_0000007")  # without the critic


def test_step_of_the_reference(parse, make_checkpoint):
    folder = make_checkpoint(iteration=3, manifest=False)
    make_checkpoint(iteration=9, manifest=False)
    args = parse("--use-kl-loss", "--ref-load", folder, "--ref-ckpt-step", "3")
    assert args.load == folder and (args.ckpt_step, args.ref_ckpt_step) == (3, 3)
    with pytest.raises(UserError, match="--ref-load"):
        parse("--use-kl-loss", "--ref-load", folder, "--ref-ckpt-step", "4")
