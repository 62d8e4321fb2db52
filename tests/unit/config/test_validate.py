"""Checks: what is refused, with the flag and the value in the message."""

from __future__ import annotations

import pytest

from slime.config import UserError

SFT = "--rollout-function-path slime.rollout.sft_rollout.generate_rollout"
FORGE = "--rollout-function-path slime.rollout.forge_load.generate_rollout"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout-batch-size 0", "--rollout-batch-size 0: must be above 0"),
        ("--n-samples-per-prompt -1", "--n-samples-per-prompt -1: must be above 0"),
        ("--rollout-temperature 0", "--rollout-temperature 0.0: must be above 0"),
        ("--num-rollout -1", "--num-rollout -1: must not be negative"),
        ("--eval-top-p 1.5", r"--eval-top-p 1.5: must be in \(0, 1\]"),
        ("--rollout-top-k 0", "--rollout-top-k 0: must be -1"),
        ("--router-prometheus-port 70000", "--router-prometheus-port 70000: a port is 1 to 65535"),
        ("--update-weights-interval 0", "--update-weights-interval 0: must be above 0"),
        ("--debug-rollout-only --debug-train-only", "--debug-rollout-only and --debug-train-only exclude each other"),
        ("--rollout-num-gpus 0", "--rollout-num-gpus 0: no engine would generate"),
        (
            "--rollout-batch-size 8 --over-sampling-batch-size 4",
            "--over-sampling-batch-size 4 is below --rollout-batch-size 8",
        ),
        ("--rollout-max-context-len 64 --rollout-max-prompt-len 64", "--rollout-max-prompt-len 64 leaves no room"),
        ("--disable-rollout-global-dataset", "--disable-rollout-global-dataset needs --num-rollout"),
        ("--rm-type remote_rm", "--rm-type remote_rm needs --rm-url"),
        ("--rm-type maths", "--rm-type maths: one of math"),
        ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "--kl-coef 0.1 and --kl-loss-coef 0.1: use one of them"),
        ("--eps-clip-c 0.9", "--eps-clip-c 0.9: must be above 1"),
        ("--use-rollout-logprobs --use-tis", "--use-rollout-logprobs and --use-tis exclude each other"),
        ("--get-mismatch-metrics", "--get-mismatch-metrics needs --custom-tis-function-path"),
        ("--loss-type custom_loss", "--loss-type custom_loss needs --custom-loss-function-path"),
        ("--tis-clip 1 --tis-clip-low 2", "--tis-clip-low 2.0 is above --tis-clip 1.0"),
        ("--only-train-params-name-list a --freeze-params-name-list b", "exclude each other"),
        ("--use-dynamic-batch-size", "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        ("--balance-by-flops", "--balance-by-flops needs --use-dynamic-batch-size"),
        ("--share-prompts --attention-dropout 0.1", "--share-prompts cannot be used with dropout"),
        ("--skip-zero-advantage --entropy-coef 0.1", "--skip-zero-advantage cannot be used with --entropy-coef 0.1"),
        ("--skip-zero-advantage --use-kl-loss", "--skip-zero-advantage cannot be used with --use-kl-loss"),
        ("--skip-zero-advantage --normalize-advantages", "cannot be used with --normalize-advantages"),
        (
            "--skip-zero-advantage --advantage-estimator reinforce_plus_plus",
            "--advantage-estimator reinforce_plus_plus",
        ),
        (
            "--skip-zero-advantage --loss-type sft_loss",
            "--skip-zero-advantage cannot be used with --loss-type sft_loss",
        ),
        ("--optimizer muon", "--optimizer muon is not built yet"),
        ("--use-stateless-adam", "--use-stateless-adam needs --optimizer adam and --no-save-optim"),
        ("--lr 1e-6 --min-lr 1e-5", "--min-lr 1e-05 is above --lr 1e-06"),
        ("--recompute-method block", "--recompute-method block needs --recompute-granularity full"),
        ("--prompt-data nowhere.jsonl", "--prompt-data .*nowhere.jsonl: no such file"),
        ("--custom-rm-path nowhere.py", "--custom-rm-path .*nowhere.py: no such file"),
        ("--custom-rm-path reward", "--custom-rm-path reward: expected package.module.attribute"),
        ("--config-file x", "unknown flag --config-file"),
        ("--entropy-coef nan --lr inf", "(?s)--entropy-coef nan: must be a finite number.*--lr inf"),
        ("--freeze-params-name-list [", r"--freeze-params-name-list \[: not a regular expression"),
        (
            "--load-debug-rollout-data d/{round}.pt --num-rollout 1",
            r"--load-debug-rollout-data .*d/\{round\}.pt: only \{rollout_id\} can be filled in",
        ),
        (
            "--save-debug-train-data d/{}.pt",
            r"--save-debug-train-data .*: only \{rollout_id\} and \{rank\} can be filled",
        ),
        (
            "--streaming-data --rollout-shuffle --num-rollout 1",
            "--streaming-data and --rollout-shuffle exclude each other",
        ),
        (
            "--disable-rollout-global-dataset --num-rollout 1",
            "--disable-rollout-global-dataset leaves --prompt-data .* to a data source of yours",
        ),
        (
            f"{SFT} --n-samples-per-prompt 2",
            "--n-samples-per-prompt 2: slime.rollout.sft_rollout.generate_rollout makes one",
        ),
        (
            f"{SFT} --eval-prompt-data a train.jsonl --eval-interval 1",
            "--eval-function-path slime.rollout.sft_rollout.generate_rollout asks no engine",
        ),
        (f"{FORGE}", "slime.rollout.forge_load.generate_rollout needs --load-forge-rollout-data"),
        (f"{FORGE} --load-forge-rollout-data d.pt", "--load-forge-rollout-data .*d.pt: no dump for round 0"),
        (
            "--load-debug-rollout-data d/{rollout_id}.pt --num-rollout 9 --start-rollout-id 3",
            r"--load-debug-rollout-data .*\{rollout_id\}.pt: no dump for round 3",
        ),
        (
            "--use-opd --opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func",
            "--opd-type sglang with slime.rollout.on_policy_distillation needs --rm-url",
        ),
        ("--num-rollout 2 --lr-warmup-iters 2", "the learning-rate schedule has 2 steps .* and a warmup of 2 "),
        ("--lr-decay-iters 9 --lr-warmup-fraction 1", "the learning-rate schedule has 9 steps .* and a warmup of 9 "),
        ("--padded-vocab-size 2", "--padded-vocab-size 2 is below --vocab-size"),
        ("--run-name=", r"--run-name \(empty\): a name"),
    ],
)
def test_mistakes_are_refused_with_flag_and_value(parse, words, message):
    with pytest.raises(UserError, match=message):
        parse(*words.split())


def test_all_problems_come_in_one_error(parse):
    with pytest.raises(UserError) as error:
        parse(*"--rollout-temperature 0 --eps-clip-c 0.5 --custom-rm-path nowhere.py".split())
    text = str(error.value)
    assert text.startswith("3 problems:")
    assert "--rollout-temperature" in text and "--eps-clip-c" in text and "--custom-rm-path" in text


def test_step_smaller_than_the_ranks_is_refused(parse):
    words = "--actor-num-gpus-per-node 4 --rollout-batch-size 1 --n-samples-per-prompt 2 --global-batch-size 2"
    with pytest.raises(UserError, match="--global-batch-size 2 is below the 4 data-parallel ranks"):
        parse(*words.split())


UNEVEN = "--actor-num-gpus-per-node 2 --micro-batch-size 2 --rollout-batch-size 3 --n-samples-per-prompt 2"


def test_static_micro_batches_must_fill_a_step(parse):
    with pytest.raises(
        UserError, match=r"--global-batch-size 6 does not divide by 2 data-parallel ranks x --micro-batch-size 2 = 4"
    ):
        parse(*UNEVEN.split())


@pytest.mark.parametrize(
    "freedom",
    [
        "--use-dynamic-batch-size --max-tokens-per-gpu 256",
        "--custom-generate-function-path a.b",
        "--debug-rollout-only",
    ],
)
def test_uneven_steps_pass_where_samples_are_packed_or_made_by_the_user(parse, freedom):
    assert parse(*UNEVEN.split(), *freedom.split()).global_batch_size == 6


def test_prompt_data_is_required_by_the_built_in_source_only(make_model, tmp_path):
    from slime.config import parse_args

    (tmp_path / "0.pt").touch()

    model = make_model()
    with pytest.raises(UserError, match="--prompt-data is missing"):
        parse_args(["--hf-checkpoint", model])
    parse_args(["--hf-checkpoint", model, "--data-source-path", "my.source.Source"])
    parse_args(["--hf-checkpoint", model, "--load-debug-rollout-data", "{rollout_id}.pt", "--num-rollout", "2"])
    with pytest.raises(UserError, match="--load-debug-rollout-data needs --num-rollout"):
        parse_args(["--hf-checkpoint", model, "--load-debug-rollout-data", "{rollout_id}.pt"])


def test_data_files_have_known_endings_and_slices(parse, data, tmp_path):
    (tmp_path / "rows.csv").write_text("a")
    with pytest.raises(UserError, match="expected a .jsonl or .parquet file"):
        parse("--prompt-data", "rows.csv")
    with pytest.raises(UserError, match=r"a slice is @\[first:last\]"):
        parse("--prompt-data", data + "@[a:b]")
    with pytest.raises(UserError, match=r"a slice is @\[first:last\]"):
        parse("--prompt-data", data + "@[5]")
    for good in ("@[0:1]", "@[-5:]", "@[:10]"):
        assert parse("--prompt-data", data + good).prompt_data == data + good


def test_reward_types_that_need_another_flag_name_it(parse):
    with pytest.raises(UserError, match="--rm-type reward_model needs --rm-model-path, or --rm-url"):
        parse("--rm-type", "reward_model")
    assert parse("--rm-type", "reward_model", "--rm-url", "http://127.0.0.1:1").rm_type == "reward_model"
    for rm_type in ("dapo", "boxed_dapo"):
        with pytest.raises(UserError, match=f"--rm-type {rm_type} gives score, acc and pred: --reward-key score"):
            parse("--rm-type", rm_type)
        assert parse("--rm-type", rm_type, "--reward-key", "score").reward_key == "score"


def test_what_other_code_than_ours_reads_is_left_to_it(parse, tmp_path):
    (tmp_path / "mine.py").write_text("")
    parse(*"--streaming-data --rollout-shuffle --num-rollout 1 --data-source-path mine.py".split())
    for flag in ("--rollout-function-path", "--data-source-path"):
        parse(*f"--disable-rollout-global-dataset --num-rollout 1 {flag} mine.py".split())
    parse(*f"{SFT} --loss-type sft_loss --debug-train-only --eval-prompt-data a train.jsonl --eval-interval 1".split())


def test_dumps_are_looked_for_where_the_run_begins(parse, tmp_path):
    (tmp_path / "0.pt").touch()
    parse(*"--load-debug-rollout-data {rollout_id}.pt --num-rollout 2".split())
    parse(*f"{FORGE} --load-forge-rollout-data {{rollout_id}}.pt --num-rollout 2 --start-rollout-id 1".split())
    parse(*"--load-debug-rollout-data {rollout_id}.pt --num-rollout 2 --start-rollout-id 2".split())
    evaluation = FORGE.replace("--rollout", "--eval")
    parse(*f"{evaluation} --load-forge-rollout-data {tmp_path}/other_{{rollout_id}}.pt --num-rollout 2".split())


def test_a_response_without_any_limit_is_refused(parse, make_model, tmp_path):
    """The model's positions are one."""
    endless = ("--hf-checkpoint", make_model("endless", max_position_embeddings=None))
    with pytest.raises(UserError, match="--rollout-max-response-len is missing"):
        parse(*endless)
    (tmp_path / "mine.py").write_text("")
    for words in (("--rollout-max-context-len", "9"), ("--custom-generate-function-path", "mine.py"), ()):
        parse(*(endless if words else ()), *words)


def test_group_reward_and_evaluation_exclude_each_other(parse, data):
    with pytest.raises(UserError, match="--group-rm is not supported in evaluation"):
        parse("--group-rm", "--eval-prompt-data", "quiz", data)
    assert parse("--group-rm").group_rm is True


def test_staleness_bound_that_cannot_be_kept_shows_the_formula(parse):
    with pytest.raises(UserError, match=r"async_buffer_size 1 \+ update_weights_interval 4 - 1 = 4 versions old"):
        parse("--update-weights-interval", "4", "--max-staleness", "2")
    assert parse("--update-weights-interval", "2", "--max-staleness", "2").max_staleness == 2


class TestUnbuilt:
    @pytest.mark.parametrize(
        "words",
        [
            "--use-routing-replay",
            "--update-weight-local-checkpoint-dir /copy",
            "--update-weight-mode delta",
            "--release-train",
            "--rollout-external-engine-addrs 127.0.0.1:1",
            "--sglang-config /engines.yaml",
            "--prefill-num-servers 1",
            "--rollout-num-gpus-per-engine 2",
            "--expert-model-parallel-size 2",
            "--mtp-num-layers 1",
            "--profile",
            "--record-memory-history",
            "--use-fault-tolerance",
            "--use-distributed-post",
            "--rollout-data-transport nixl",
            "--multi-latent-attention",
            "--fp8-format hybrid",
            "--cpu-offloading",
            "--train-iters 10",
            "--data-path corpus",
        ],
    )
    def test_unbuilt_capabilities_are_refused_with_the_flag_and_a_reason(self, parse, words):
        with pytest.raises(UserError, match=rf"^{words}: .{{10,}}$"):
            parse(*words.split())

    @pytest.mark.parametrize(
        "words",
        [
            "--no-offload-train",
            "--no-offload-rollout",
            "--rollout-top-p 0.9",
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1",
            "--update-weight-transport nccl --update-weight-mode full",
            "--rollout-num-gpus-per-engine 1",
            "--advantage-estimator gspo",
        ],
    )
    def test_values_that_mean_off_are_accepted(self, parse, words):
        parse(*words.split())

    def test_flags_of_one_capability_stand_together(self, parse):
        with pytest.raises(UserError) as error:
            parse(*"--multi-latent-attention --q-lora-rank 4 --release-train".split())
        text = str(error.value)
        assert text.count("multi-latent attention") == 1
        assert "--multi-latent-attention, --q-lora-rank 4: multi-latent" in text
        assert "--release-train: ending the trainer" in text

    def test_values_from_files_are_refused_too(self, parse, tmp_path):
        for flag in ("--config", "--custom-config-path"):
            path = tmp_path / "run.yaml"
            path.write_text("use_fault_tolerance: true\n")
            with pytest.raises(UserError, match="--use-fault-tolerance: restarting dead engines"):
                parse(flag, str(path))


def test_a_misspelt_hook_file_is_suggested(tmp_path, parse):
    (tmp_path / "my_reward.py").write_text("")
    with pytest.raises(
        ValueError, match=r"--custom-rm-path .*my_rewrad.py:f: no such file \(did you mean my_reward.py\?\)"
    ):
        parse("--custom-rm-path", f"{tmp_path}/my_rewrad.py:f")
