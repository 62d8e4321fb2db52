"""What actor and critic have of their own, and what a run with a critic or a teacher needs."""

from __future__ import annotations

import pytest

from slime.config import UserError
from slime.config.roles import role_args
from slime.config.validate import fit_to_async_loop

PPO = ("--advantage-estimator", "ppo", "--num-rollout", "3")
ENGINE_SCORES = "--use-opd --opd-type sglang --custom-rm-path slime.rollout.on_policy_distillation.reward_func"


@pytest.fixture
def write(tmp_path):
    def write_file(text: str) -> str:
        (tmp_path / "roles.yaml").write_text(text)
        return "roles.yaml"

    return write_file


def critic_file(overrides: str) -> str:
    return f"megatron:\n  - name: critic\n    role: critic\n    overrides: {overrides}\n"


def test_critic_without_a_file_is_the_actor_but_for_what_a_critic_never_does(parse):
    args = parse(*PPO, "--lr", "1e-3", "--use-opd", "--opd-type", "sglang")
    critic = role_args(args, "critic")
    assert args.use_critic and args.offload_train and args.num_critic_slots == 0
    assert critic.lr == 1e-3 and critic.untie_embeddings_and_output_weights and not critic.use_opd
    assert role_args(args, "actor").use_opd


def test_overrides_are_converted_as_on_the_command_line_and_reach_one_role(parse, write, make_model):
    other = make_model("other")
    overrides = "{lr: 1e-5, clip-grad: 2, load: other, only_train_params_name_list: [output_layer]}".replace(
        "-grad", "_grad"
    )
    path = write(critic_file(overrides) + "  - {role: actor, args: {lr: '2e-6', num_nodes: 3}}\n")
    args = parse(*PPO, "--lr", "1e-3", "--megatron-config-path", path)
    critic, actor = role_args(args, "critic"), role_args(args, "actor")
    assert (args.lr, actor.lr, critic.lr, critic.clip_grad) == (1e-3, 2e-6, 1e-5, 2.0)
    assert critic.load == other and critic.only_train_params_name_list == ["output_layer"]
    assert actor.load == args.load and actor.actor_num_nodes == 1
    assert any("actor: num_nodes is ignored" in note for note in args.start_notes)


def test_actor_overrides_hold_without_a_critic(parse, write):
    path = write("megatron: [{role: actor, overrides: {lr: 3e-6}}]")
    assert role_args(parse("--num-rollout", "3", "--megatron-config-path", path), "actor").lr == 3e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no list under the key megatron"),
        ("megatron: {role: critic}", "no list under the key megatron"),
        ("critic: {lr: 1}", "no list under the key megatron"),
        ("megatron: [{role: judge}]", "role 'judge' is not one of actor, critic"),
        ("megatron: [critic]", "role None is not one of"),
        ("megatron: [{role: critic}, {role: critic}]", "two entries for the role critic"),
        ("megatron: [{role: critic, overrides: [lr]}]", "critic: overrides must be a mapping"),
        (critic_file("{lr: fast}"), "critic: lr: .*fast"),
        (critic_file("{lr: -1}"), "critic: --lr -1.0: must not be negative"),
        (critic_file("{optimizer: muon}"), "critic: --optimizer muon"),
        (
            critic_file("{tensor_model_parallel_size: 2}"),
            "critic: tensor_model_parallel_size 2: all roles have the same, 1",
        ),
        (critic_file("{global_batch_size: 4}"), "critic: global_batch_size 4: all roles have the same"),
        (critic_file("{load: nowhere}"), "critic: load .*nowhere: neither a Hugging Face folder nor"),
        ("megatron: [{role: actor, overrides: {load: x}}]", "actor: load: give it as the flag --load"),
        (critic_file("{mtp_num_layers: 1}"), "critic: --mtp-num-layers 1: multi-token prediction is not built"),
    ],
)
def test_faults_of_the_file_name_file_role_and_key(parse, write, text, message):
    with pytest.raises(UserError, match=f"--megatron-config-path .*roles.yaml: .*{message}"):
        parse(*PPO, "--megatron-config-path", write(text))


def test_key_that_no_flag_has_is_set_and_named(parse, write):
    args = parse(*PPO, "--megatron-config-path", write(critic_file("{lr_warm_iters: 3, save: there, load: there}")))
    assert role_args(args, "critic").lr_warm_iters == 3 and role_args(args, "critic").save == args.save
    notes = "\n".join(args.start_notes)
    assert "critic: no flag has the attribute lr_warm_iters" in notes and "lr_warmup_iters" in notes
    assert "critic: save is ignored: the critic is saved in the checkpoints of --save" in notes
    assert "critic: load holds nothing yet" in notes


def test_critic_on_slots_of_its_own(parse):
    args = parse(*PPO, "--critic-slots", "own", "--actor-num-gpus-per-node", "2")
    assert args.num_critic_slots == 2 and not args.offload_train
    for flags in (("--critic-slots", "own"), ("--num-critic-only-steps", "1")):
        with pytest.raises(UserError, match=f"{flags[0]} {flags[1]}: there is no critic"):
            parse("--num-rollout", "3", *flags)


def test_fb_l19_ppo_on_samples_of_earlier_weights_says_whose_log_probs_are_the_old_ones(parse):
    with pytest.raises(UserError, match="one of --use-rollout-logprobs, --use-tis, --keep-old-actor"):
        fit_to_async_loop(parse(*PPO))
    for choice in ("--use-rollout-logprobs", "--use-tis", "--keep-old-actor"):
        fit_to_async_loop(parse(*PPO, choice))
    fully_async = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")
    with pytest.raises(UserError, match="one of --use-rollout-logprobs, --use-tis:"):
        parse(*PPO, *fully_async)
    with pytest.raises(UserError, match="--keep-old-actor: samples of the fully asynchronous"):
        parse("--num-rollout", "3", "--keep-old-actor", *fully_async)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-opd", "--use-opd needs --opd-type"),
        ("--use-opd --opd-type megatron", "--opd-type megatron needs --opd-teacher-load"),
        ("--use-opd --opd-type megatron --opd-teacher-load nowhere", "--opd-teacher-load .*nowhere: no such folder"),
        ("--use-opd --opd-type megatron --opd-teacher-load .", "neither a Hugging Face folder nor a Megatron"),
        ("--use-opd --opd-type sglang --opd-teacher-load .", "--opd-type sglang the log-probs come with the samples"),
        (f"{ENGINE_SCORES} --rollout-top-p 0.9", "--rollout-top-p 0.9 with a teacher on an engine"),
        (f"{ENGINE_SCORES} --rollout-temperature 0.8", "--rollout-temperature 0.8 with a teacher on an engine"),
        ("--opd-teacher-load .", "there is no teacher without --use-opd"),
    ],
)
def test_distillation_says_where_the_teacher_is(parse, flags, message):
    with pytest.raises(UserError, match=message):
        parse("--num-rollout", "3", *flags.split())
