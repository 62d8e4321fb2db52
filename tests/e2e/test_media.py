"""Rows with images through ``train.py``: a generate function looks at them; dump, checkpoint and continuation keep them."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image

from slime.config import checkpoint_dirs
from slime.observability.debug_dump import load_rollout_dump
from tests.e2e.conftest import write_rows
from tests.e2e.test_sync_loop import SMALL

HOOKS = "tests.e2e.media_hooks"


def png(red: int) -> str:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (red, 20, 30)).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.slow
def test_images_reach_the_shards_and_survive_dump_checkpoint_and_continuation(train, tmp_path):
    rows = [{"input": "<image> which red?", "label": str(number), "images": [png(number)]} for number in range(40)]
    flags = (
        *(
            *SMALL,
            "--prompt-data",
            write_rows(tmp_path / "rows.jsonl", rows),
            "--multimodal-keys",
            '{"image": "images"}',
        ),
        *(
            "--custom-generate-function-path",
            f"{HOOKS}.describe_and_ask",
            "--custom-rm-path",
            f"{HOOKS}.colour_is_kept",
        ),
        *("--partial-rollout", "--over-sampling-batch-size", 8, "--streaming-data", "--save", tmp_path / "save"),
        *("--save-interval", 1, "--dump-details", tmp_path / "dump", "--lr-decay-style", "constant"),
    )
    first = train(*flags, "--num-rollout", 1, name="first")
    assert "models read text only" in first.output and first.series("rollout/reward_failed") == [0]
    buffer = torch.load(f"{checkpoint_dirs.latest(str(tmp_path / 'save')).directory}/data_buffer.pt", weights_only=True)
    waiting = [sample for group in buffer["buffer"] for sample in group]
    assert waiting and all(sample["multimodal_inputs"]["images"] for sample in waiting)
    second = train(*flags, "--num-rollout", 3, name="second")
    assert [line["step"] for line in second.metrics("train/step")] == [1, 2]
    assert second.series("rollout/reward_failed") == [0, 0]
    labels = []
    for rollout_id in range(3):
        samples = load_rollout_dump(str(tmp_path / "dump" / "rollout_data" / "{rollout_id}.pt"), rollout_id)
        reds = [sample.multimodal_inputs["images"][0].getpixel((0, 0))[0] for sample in samples]
        assert reds == [int(sample.label) for sample in samples] and len(samples) == 16
        labels += reds[::4]
        trained = torch.load(tmp_path / "dump" / "train_data" / f"{rollout_id}.pt", weights_only=True)["samples"]
        for sample, red in zip(trained, reds, strict=True):
            assert sample["multimodal_train_inputs"]["pixel_values"][0, 0].tolist() == [red, 20, 30]
            assert sample["multimodal_train_inputs"]["size"] == (5, 4)
    assert len(set(labels)) == 12  # no prompt twice: those that waited in the checkpoint were trained
    again = ("--load-debug-rollout-data", tmp_path / "dump" / "rollout_data" / "{rollout_id}.pt", "--num-rollout", 1)
    replayed = train(*SMALL, *again, "--multimodal-keys", '{"image": "images"}', name="replayed")
    assert replayed.series("train/grad_norm") == first.series("train/grad_norm")
