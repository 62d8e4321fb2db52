"""Parallel sizes: what is derived, and what is refused with the flags in the message."""

from __future__ import annotations

import pytest

from slime.config import UserError, parse_args

FOUR = "--actor-num-gpus-per-node 4 --global-batch-size 8 --n-samples-per-prompt 8 --rollout-batch-size 1"


@pytest.fixture
def parse(make_model, data):
    """Parse flags for a model of 8 layers, 4 heads, 2 key-value heads on four slots."""
    model = make_model("eight", num_hidden_layers=8)

    def run(words: str):
        return parse_args([*FOUR.split(), "--hf-checkpoint", model, "--prompt-data", data, *words.split()])

    return run


@pytest.mark.parametrize(
    ("words", "data_ranks"),
    [
        ("", 4),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--pipeline-model-parallel-size 4", 1),
        ("--context-parallel-size 2", 2),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2", 1),
    ],
)
def test_data_parallel_size_is_what_the_others_leave(parse, words, data_ranks):
    assert parse(words).data_parallel_size == data_ranks


@pytest.mark.parametrize(
    "words", ["--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2"]
)
def test_virtual_pipeline_from_either_spelling(parse, words):
    args = parse(f"--pipeline-model-parallel-size 2 {words}")
    assert (args.virtual_pipeline_model_parallel_size, args.microbatch_group_size_per_vp_stage) == (2, 2)


def test_one_virtual_stage_is_no_virtual_pipeline(parse):
    args = parse("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4")
    assert args.virtual_pipeline_model_parallel_size is args.microbatch_group_size_per_vp_stage is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: must be at least 1"),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4",
            "= 4 slots do not divide by --tensor-model-parallel-size 2 x --pipeline-model-parallel-size 4 x "
            "--context-parallel-size 1 = 8",
        ),
        ("--tensor-model-parallel-size 4", r"--tensor-model-parallel-size 4 does not divide .*key-value heads \(2\)"),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1",
            "--pipeline-model-parallel-size 4: 8 layers cannot be spread evenly",
        ),
        ("--decoder-first-pipeline-num-layers 1", "need --pipeline-model-parallel-size"),
        ("--num-virtual-stages-per-pipeline-rank 2", "needs --pipeline-model-parallel-size of at least 2"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
            "--num-virtual-stages-per-pipeline-rank 3: the layers of a pipeline stage do not divide by it",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3: 8 layers over --pipeline-model-parallel-size 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "use one of them",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 4",
            "--global-batch-size 8 does not divide by 2 data-parallel ranks x 2 micro-batches of the virtual pipeline x "
            "--micro-batch-size 4 = 16",
        ),
        ("--context-parallel-size 2 --share-prompts", "--context-parallel-size 2 cannot be used with --share-prompts"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(parse, words, message):
    with pytest.raises(UserError, match=message):
        parse(words)
