"""Flags of the weight sync that need or exclude each other."""

from __future__ import annotations

import os

import pytest

from slime.config import UserError

DISK = ("--update-weight-transport", "disk")


def test_disk_transport_needs_its_folder(parse):
    with pytest.raises(UserError, match="--update-weight-transport disk needs --update-weight-disk-dir"):
        parse(*DISK)
    args = parse(*DISK, "--update-weight-disk-dir", "weights")
    assert args.update_weight_disk_dir == os.path.abspath("weights") and not args.update_weight_disk_keep_files


def test_adapters_alone_do_not_go_through_version_folders(parse):
    flags = (*DISK, "--update-weight-disk-dir", "weights", "--lora-rank", "4")
    assert parse(*flags).lora_sync == "merged"
    with pytest.raises(UserError, match="--update-weight-transport disk cannot be used with --lora-sync adapter"):
        parse(*flags, "--lora-sync", "adapter")


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--load", "--ref-load"])
def test_a_run_does_not_start_from_a_folder_that_it_would_replace(parse, make_model, flag):
    os.mkdir("weights")
    kept, beside = make_model("weights/weight_v000003"), make_model("weights/base")
    with pytest.raises(UserError, match=f"{flag} {kept} is a version folder of --update-weight-disk-dir"):
        parse(*DISK, "--update-weight-disk-dir", "weights", flag, kept)
    parse(*DISK, "--update-weight-disk-dir", "weights", flag, beside)
    parse(flag, kept)


def test_flags_of_another_transport_are_said_to_do_nothing(parse):
    flags = ("--update-weight-disk-dir", "weights", "--update-weight-disk-keep-files")
    (note,) = [note for note in parse(*flags).start_notes if "--update-weight" in note]
    assert note == (
        "--update-weight-disk-dir, --update-weight-disk-keep-files: no effect without --update-weight-transport disk"
    )
    assert not any("--update-weight" in note for note in parse(*DISK, *flags).start_notes)
