"""Where weights come from and go to, and continuing a run."""

from __future__ import annotations

import pytest

from slime.config import UserError, parse_args
from slime.config.checkpoint_paths import complete_iteration


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(name: str = "ckpt", iteration: int = 7, manifest: bool = True) -> str:
        folder = tmp_path / name
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)
        if manifest:
            (folder / f"iter_{iteration:07d}" / "manifest.json").write_text("{}")
        (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
        return str(folder)

    return make


def said(args, text: str) -> bool:
    return any(text in note for note in args.start_notes)


def test_only_a_committed_iteration_is_complete(make_checkpoint, tmp_path):
    assert complete_iteration(make_checkpoint("whole")) == 7
    assert complete_iteration(make_checkpoint("half", manifest=False)) is None
    assert complete_iteration(str(tmp_path / "nowhere")) is None
    assert complete_iteration(None) is None


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
    assert said(args, f"continuing from iteration 7 in {folder}")


def test_named_run_continues_from_its_own_folder(parse, make_checkpoint):
    folder = make_checkpoint("outputs/first/checkpoints")
    args = parse("--run-name", "first", "--save-interval", "5")
    assert args.load == args.save == folder


def test_half_written_checkpoint_is_ignored(parse, make_checkpoint):
    folder = make_checkpoint(manifest=False)
    assert parse("--save", folder).load == parse().load


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
    args = parse("--load", make_checkpoint(), "--finetune")
    assert (args.no_load_optim, args.no_load_rng, args.start_rollout_id) == (True, True, 0)


def test_save_folder_with_an_earlier_run_is_said(parse, make_checkpoint):
    args = parse("--load", make_checkpoint("old"), "--save", make_checkpoint("new", 9))
    assert said(args, "holds checkpoints of an earlier run")


def test_load_that_will_be_written_later_falls_back(parse, tmp_path):
    args = parse("--load", "ckpt", "--save", "ckpt")
    assert args.load == args.hf_checkpoint
    assert said(args, f"--load {tmp_path / 'ckpt'} holds no checkpoint yet")


def test_load_of_nothing_is_an_error(parse, tmp_path):
    with pytest.raises(UserError, match=f"--load {tmp_path / 'nowhere'}: neither a checkpoint"):
        parse("--load", "nowhere")


def test_foreign_megatron_checkpoint_is_an_error_that_says_what_to_do(parse, make_checkpoint):
    with pytest.raises(UserError, match="convert a Megatron checkpoint"):
        parse("--load", make_checkpoint(manifest=False))


def test_save_interval_without_save_uses_the_run_folder(parse, tmp_path):
    args = parse("--save-interval", "5", "--run-name", "first")
    assert args.save == str(tmp_path / "outputs" / "first" / "checkpoints")
    assert said(args, "checkpoints go to")


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
