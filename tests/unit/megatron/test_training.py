"""Rounds of training: the loss falls, weights switch exactly, schedules and hooks run, a resumed run is the same run."""

import os
import threading
from contextlib import nullcontext

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def start(args, load_dir=None):
    from slime.backends.megatron_utils.actor import MegatronActor

    actor = MegatronActor(args, 0, 1, "127.0.0.1", 0)
    return actor, actor.init(load_dir)


def exported(actor):
    return {name: tensor.clone() for name, tensor in actor.export_weights()}


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "plain optimizer"])
def test_background_save_holds_the_state_of_its_moment(model_dir, tmp_path, monkeypatch, distributed):
    """Files are written late, from a copy: what is trained meanwhile is not in them, and nothing counts before the end."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    may_write, write = threading.Event(), FileSystemWriterAsync.write_preloaded_data

    def late(*arguments, **options):
        assert may_write.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(late))
    args = train_args(model_dir, lr=1e-2, async_save=True, use_distributed_optimizer=distributed)
    actor, _ = start(args)
    shard = make_shard(args)
    actor.train(0, shard)
    at_save = exported(actor)
    directory = tmp_path / "iter_0000000"
    directory.mkdir()
    actor.save(str(directory))
    actor.train(1, shard)
    straight = exported(actor)
    assert not actor.save_is_written() and not (directory / "metadata.json").exists()
    may_write.set()
    actor.finish_save()
    assert actor.save_is_written() and (directory / "metadata.json").exists()
    resumed, first = start(args, str(directory))
    assert first == 1 and all(torch.equal(tensor, at_save[name]) for name, tensor in exported(resumed).items())
    resumed.train(1, shard)
    assert all(torch.equal(tensor, straight[name]) for name, tensor in exported(resumed).items())


@pytest.mark.parametrize("background", [False, True])
def test_save_that_cannot_write_says_so(model_dir, tmp_path, background):
    actor, _ = start(train_args(model_dir, async_save=background))
    directory = tmp_path / "iter_0000000"
    directory.mkdir()
    (directory / "__0_0.distcp").mkdir()  # where its file goes
    with pytest.raises(RuntimeError, match="the checkpoint could not be written: .*Is a directory"):
        actor.save(str(directory))
        actor.finish_save()
    assert not (directory / "metadata.json").exists()


def test_grpo_raises_the_probability_of_rewarded_responses(model_dir):
    actor, first = start(train_args(model_dir, lr=5e-3))
    assert first == 0
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]])

    def margin():
        from slime.backends.megatron_utils.data import ShardBatches
        from slime.backends.megatron_utils.log_probs import log_prob_pass

        rows = log_prob_pass(actor.args, actor.model, ShardBatches(shard, 1, torch.device("cpu")))["log_probs"]
        return sum(r * float(row.mean()) for r, row in zip(shard["rewards"], rows, strict=True))

    before = margin()
    for rollout_id in range(6):
        result = actor.train(rollout_id, shard)
    assert margin() > before + 1
    assert set(result["steps"]) == {5}
    assert {"perf/actor_train_time", "perf/train_time", "perf/actor_train_tok_per_s"} <= result["rollout"].keys()


def test_several_steps_per_round_drift_from_the_old_policy(model_dir):
    args = train_args(model_dir, lr=1e-2, global_batch_size=2)
    actor, _ = start(args)
    result = actor.train(3, make_shard(None, micro_batches=[[0, 1], [2, 3]], num_steps=2))
    assert set(result["steps"]) == {6, 7}
    assert abs(result["steps"][6]["train/ppo_kl"]) < 1e-6
    assert abs(result["steps"][7]["train/ppo_kl"]) > 1e-4
    assert "perf/log_probs_time" in result["rollout"]


def test_reuse_of_the_training_forward_changes_nothing(model_dir):
    """The shortcut (no pass for old log-probs) and the explicit pass train the same."""
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
    shortcut, _ = start(train_args(model_dir))
    explicit, _ = start(train_args(model_dir, keep_old_actor=True))
    a, b = shortcut.train(0, shard), explicit.train(0, shard)
    assert "perf/log_probs_time" not in a["rollout"] and "perf/log_probs_time" in b["rollout"]
    assert a["rollout"]["rollout/log_probs"] == pytest.approx(b["rollout"]["rollout/log_probs"], abs=1e-6)
    weights = exported(explicit)
    for name, tensor in exported(shortcut).items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0)


def test_reference_switch_is_exact_and_follows_its_interval(model_dir, tmp_path):
    other = make_tiny_model(tmp_path / "ref", init_std=0.1, seed=7)
    args = train_args(
        model_dir,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        ref_load=str(other),
        load=str(model_dir),
        ref_update_interval=2,
        lr=1e-2,
    )
    actor, _ = start(args)
    before = exported(actor)
    actor.backup.switch("ref")
    from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights

    reference = {n: t.clone() for n, t in export_hf_weights(actor.model, args)}
    from safetensors.torch import load_file

    assert all(torch.equal(t, reference[n]) for n, t in load_file(other / "model.safetensors").items())
    actor.backup.switch("actor")
    assert all(torch.equal(t, before[n]) for n, t in exported(actor).items())
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]])
    kl = [actor.train(i, shard)["steps"][i]["train/kl_loss"] for i in range(3)]
    assert abs(kl[0]) > 1e-2 and abs(kl[2]) < 1e-6  # after round 1 the reference became the actor


@pytest.mark.parametrize(
    "style, expected",
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_counts_samples_over_the_whole_run(model_dir, style, expected):
    actor, _ = start(train_args(model_dir, lr=1.0, optimizer="sgd", clip_grad=1e-6, lr_decay_style=style))
    seen = [actor.optimizer.param_groups[0]["lr"]]
    for i in range(3):
        result = actor.train(i, make_shard(None, micro_batches=[[0, 1, 2, 3]]))
        seen.append(result["steps"][i]["train/lr-pg_0"])
    assert seen == pytest.approx(expected, abs=1e-6)


def test_warmup_as_long_as_the_run_is_refused_for_decaying_schedules(model_dir):
    with pytest.raises(ValueError, match="--lr-warmup-iters"):
        start(train_args(model_dir, lr_decay_style="linear", lr_warmup_iters=4))


@pytest.mark.parametrize("precision, optimizer", [("fp32", "adam"), ("bf16", "adam"), ("fp32", "sgd")])
def test_resumed_run_equals_uninterrupted_run(model_dir, tmp_path, precision, optimizer):
    flags = dict(lr=1e-2, lr_decay_style="cosine", precision=precision, weight_decay=0.1)
    flags |= dict(optimizer=optimizer, sgd_momentum=0.9)
    shards = [make_shard(None, micro_batches=[[0, 1], [2, 3]], seed=i) for i in range(4)]
    actor, _ = start(train_args(model_dir, **flags))
    for i in range(2):
        actor.train(i, shards[i])
    directory = tmp_path / "iter_0000001"
    os.makedirs(directory)
    actor.save(str(directory))
    straight = [actor.train(i, shards[i])["steps"][i] for i in (2, 3)]
    resumed, first = start(train_args(model_dir, **flags), str(directory))
    assert first == 2
    again = [resumed.train(i, shards[i])["steps"][i] for i in (2, 3)]
    assert again == straight  # to the last bit, also at the second step after loading
    assert resumed.export_checksums() == actor.export_checksums()


def test_fb_a13_schedule_is_not_advanced_twice_by_a_resume(model_dir, tmp_path):
    flags = dict(lr=1.0, optimizer="sgd", clip_grad=1e-6, lr_decay_style="linear", lr_warmup_iters=10, num_rollout=20)
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]])
    actor, _ = start(train_args(model_dir, **flags))
    for i in range(4):
        actor.train(i, shard)
    directory = tmp_path / "iter_0000003"
    os.makedirs(directory)
    actor.save(str(directory))
    resumed, first = start(train_args(model_dir, **flags), str(directory))
    assert first == 4
    expected = [actor.train(i, shard)["steps"][i]["train/lr-pg_0"] for i in (4, 5)]
    assert [resumed.train(i, shard)["steps"][i]["train/lr-pg_0"] for i in (4, 5)] == expected
    assert expected == pytest.approx([0.5, 0.6])


def test_continuing_for_more_rounds_takes_the_schedule_of_the_new_command(model_dir, tmp_path, caplog):
    flags = dict(lr=1.0, optimizer="sgd", clip_grad=1e-6, lr_decay_style="linear")
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]])
    actor, _ = start(train_args(model_dir, **flags, num_rollout=4))
    for i in range(2):
        actor.train(i, shard)
    directory = tmp_path / "iter_0000001"
    os.makedirs(directory)
    actor.save(str(directory))
    longer, _ = start(train_args(model_dir, **flags, num_rollout=8), str(directory))
    assert longer.train(2, shard)["steps"][2]["train/lr-pg_0"] == pytest.approx(1 - 3 / 8)
    assert "lr_decay_steps 16 -> 32" in caplog.text


def test_moved_reference_survives_a_resume(model_dir, tmp_path):
    flags = dict(use_kl_loss=True, kl_loss_coef=0.1, load=str(model_dir), ref_update_interval=2, lr=1e-2, num_rollout=8)
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]])
    actor, _ = start(train_args(model_dir, **flags))
    directories = [tmp_path / f"iter_000000{i}" for i in range(4)]
    for i, directory in enumerate(directories):
        actor.train(i, shard)
        os.makedirs(directory)
        actor.save(str(directory))
    assert not (directories[0] / "reference").exists()  # still the weights of --ref-load
    straight = [actor.train(i, shard)["steps"][i] for i in (4, 5)]
    resumed, _ = start(train_args(model_dir, **flags), str(directories[2]))
    again = [resumed.train(i, shard)["steps"][i] for i in (3, 4, 5)][1:]
    assert again == straight
    assert resumed.export_checksums() == actor.export_checksums()
    other, _ = start(train_args(model_dir, **flags), str(directories[0]))
    assert other.train(1, shard)["steps"][1]["train/kl_loss"] > again[0]["train/kl_loss"] + 1e-4


def test_weights_of_a_megatron_directory_load_alone(model_dir, tmp_path):
    actor, _ = start(train_args(model_dir, lr=1e-2))
    actor.train(0, make_shard(None))
    os.makedirs(tmp_path / "iter_0000000")
    actor.save(str(tmp_path / "iter_0000000"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    other, first = start(train_args(model_dir, load=str(tmp_path)))
    assert first == 0
    assert other.export_checksums() == actor.export_checksums()
    with pytest.raises(ValueError, match="iter_0000009"):
        start(train_args(model_dir, load=str(tmp_path), ckpt_step=9))


def test_bf16_keeps_fp32_master_weights(model_dir):
    """Steps far below bf16 resolution add up instead of vanishing."""
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]])
    actor, _ = start(train_args(model_dir, precision="bf16", lr=1e-5, num_rollout=100))
    before = exported(actor)
    for i in range(40):
        actor.train(i, shard)
    after = exported(actor)
    assert next(iter(after.values())).dtype == torch.bfloat16
    moved = sum(int((after[n] != before[n]).sum()) for n in after)
    assert moved > 0.05 * sum(t.numel() for t in after.values())


def test_arguments_of_the_real_parser_train(model_dir, tmp_path):
    from slime.config import parse_args

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "label": "b"}\n' * 4)
    flags = f"--hf-checkpoint {model_dir} --prompt-data {prompts} --num-rollout 2 --rollout-batch-size 2"
    flags += f" --n-samples-per-prompt 2 --lr 1e-3 --output-dir {tmp_path} --rm-type math --precision fp32"
    args = parse_args(flags.split())
    actor, first = start(args)
    result = actor.train(first, make_shard(args, micro_batches=[[0, 1], [2, 3]]))
    assert result["steps"][0]["train/step_skipped"] == 0
    assert result["rollout"]["perf/actor_train_tflops"] > 0


HOOKS = """
calls = []
def init(args): calls.append("init")
def before_log_prob(args, model, store_prefix): calls.append(("log_prob", store_prefix))
def before_step(args, rollout_id, step_id, model, optimizer, scheduler): calls.append(("step", rollout_id, step_id))
def postprocess(args, rollout_id, rollout_data): calls.append(("post", rollout_id, "advantages" in rollout_data))
def advantages(args, rollout_data):
    calls.append(("advantages", "kl" in rollout_data))
    rollout_data["advantages"] = [m.float() * 0 for m in rollout_data["loss_masks"]]
    rollout_data["returns"] = rollout_data["advantages"]
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    calls.append("reducer")
    return lambda x: x.sum()
"""


def test_hooks_run_in_order_with_their_arguments(model_dir, tmp_path):
    file = tmp_path / "hooks_of_test.py"
    file.write_text(HOOKS)
    args = train_args(
        model_dir,
        custom_megatron_init_path=f"{file}:init",
        custom_megatron_before_log_prob_hook_path=f"{file}:before_log_prob",
        custom_megatron_before_train_step_hook_path=f"{file}:before_step",
        rollout_data_postprocess_path=f"{file}:postprocess",
        custom_advantage_function_path=f"{file}:advantages",
        custom_pg_loss_reducer_function_path=f"{file}:reducer",
    )
    actor, _ = start(args)
    actor.train(4, make_shard(None, micro_batches=[[0, 1, 2, 3]]))
    from slime.utils.misc import load_function

    calls = load_function(f"{file}:calls")
    expected = ["init", ("log_prob", ""), ("advantages", True), ("post", 4, True), ("step", 4, 0), "reducer"]
    assert calls == expected


def test_hooks_get_lengths_and_rewards_of_their_own_samples_beside_the_rewards_of_the_batch(model_dir, tmp_path):
    file = tmp_path / "own_columns.py"
    file.write_text("seen = {}\n\ndef postprocess(args, rollout_id, rollout_data):\n    seen.update(rollout_data)\n")
    actor, _ = start(train_args(model_dir, rollout_data_postprocess_path=f"{file}:postprocess"))
    batch = {"total_lengths": [5, 9, 6, 12, 8, 7, 4, 15], "raw_reward": [0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0]}
    actor.train(0, make_shard(None, micro_batches=[[0, 1, 2, 3]], partition=[1, 3, 5, 7], **batch))
    from slime.utils.misc import load_function

    seen = load_function(f"{file}:seen")
    assert seen["total_lengths"] == [9, 12, 7, 15] == [len(tokens) for tokens in seen["tokens"]]
    assert seen["local_raw_reward"] == [1.0, 2.0, 3.0, 4.0] and seen["raw_reward"] == batch["raw_reward"]


def test_a_bare_file_names_its_hook_and_a_wrong_path_ends_the_start(model_dir, tmp_path):
    file = tmp_path / "own_loss.py"
    file.write_text(
        "def loss_function(args, columns, logits, reduce):\n    return logits.sum() * 0, {'own': logits.new_tensor(7.0)}\n"
    )
    args = train_args(model_dir, loss_type="custom_loss", custom_loss_function_path=str(file))
    actor, _ = start(args)
    result = actor.train(0, make_shard(None, micro_batches=[[0, 1, 2, 3]]))
    assert "train/own" in result["steps"][0]
    wrong = train_args(model_dir, custom_tis_function_path=f"{file}:nothing")
    with pytest.raises(ValueError, match="--custom-tis-function-path.*has no 'nothing'.*loss_function"):
        start(wrong)


LOSSES = """
import torch
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_responses, policy_loss_function
from slime.utils.ppo_utils import calculate_log_probs_and_entropy, compute_policy_loss

def built_in(args, batch, logits, sum_of_sample_mean):
    return policy_loss_function(args, batch, logits, sum_of_sample_mean)

def by_hand(args, batch, logits, sum_of_sample_mean):
    lengths = batch["total_lengths"], batch["response_lengths"]
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=lengths[0], response_lengths=lengths[1],
        with_entropy=True,
    )
    ppo_kl = torch.cat(batch["log_probs"]) - torch.cat(found["log_probs"])
    pg_loss, clipfrac = compute_policy_loss(ppo_kl, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high)
    own = get_sum_of_sample_mean(*lengths, batch["loss_masks"], args.calculate_per_token_loss)
    assert torch.equal(own(pg_loss), sum_of_sample_mean(pg_loss))
    entropy_loss = own(torch.cat(found["entropy"]))
    loss = own(pg_loss) - args.entropy_coef * entropy_loss
    return loss, {"loss": loss, "pg_clipfrac": own(clipfrac), "entropy_loss": entropy_loss}

def from_logits(args, batch, logits, sum_of_sample_mean):
    from megatron.core import mpu
    parts = list(get_responses(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    ))
    group = mpu.get_tensor_model_parallel_group()
    found = [calculate_log_probs_and_entropy(*part, group, with_entropy=True) for part in parts]
    ppo_kl = torch.cat(batch["log_probs"]) - torch.cat([log_probs.squeeze(-1) for log_probs, _ in found])
    pg_loss, clipfrac = compute_policy_loss(ppo_kl, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high)
    entropy_loss = sum_of_sample_mean(torch.cat([entropy for _, entropy in found]))
    loss = sum_of_sample_mean(pg_loss) - args.entropy_coef * entropy_loss
    return loss, {"loss": loss, "pg_clipfrac": sum_of_sample_mean(clipfrac), "entropy_loss": entropy_loss}
"""


def test_a_custom_loss_may_read_the_stream_and_is_told_where_it_is(model_dir, tmp_path):
    text = """
import torch

def stream(args, batch, logits, sum_of_sample_mean):
    labels = batch["packed_tokens"].roll(-1, dims=1)
    log_probs = logits.log_softmax(-1).gather(2, labels[..., None])[..., 0]
    chosen = log_probs[batch["full_loss_masks"].bool()]
    assert torch.allclose(chosen, torch.cat(batch["log_probs"])[torch.cat(batch["loss_masks"]).bool()], atol=1e-5)
    return -chosen.sum(), {"loss": -chosen.sum()}

def takes_it_for_the_stream(args, batch, logits, sum_of_sample_mean):
    return batch["tokens"].roll(-1, dims=1)
"""
    (tmp_path / "losses.py").write_text(text)
    masks = [torch.tensor(row, dtype=torch.int32) for row in ([1, 0, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 0], [1] * 8)]
    for name, raises in (
        ("stream", None),
        ("takes_it_for_the_stream", "the packed stream .* is batch.'packed_tokens'."),
    ):
        custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{tmp_path}/losses.py:{name}"}
        actor, _ = start(train_args(model_dir, **custom))
        with pytest.raises(RuntimeError, match=raises) if raises else nullcontext():
            actor.train(0, make_shard(None, micro_batches=[[0, 1], [2, 3]], loss_masks=masks))


@pytest.mark.parametrize("loss", ["built_in", "by_hand", "from_logits"])
def test_a_custom_loss_made_of_the_public_functions_is_the_policy_loss(model_dir, tmp_path, loss):
    (tmp_path / "losses.py").write_text(LOSSES)
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{tmp_path}/losses.py:{loss}"}
    steps = []
    for overrides in ({}, custom):
        actor, _ = start(train_args(model_dir, entropy_coef=0.1, rollout_temperature=0.8, **overrides))
        shard = make_shard(None, micro_batches=[[0, 1], [2, 3]], num_steps=2)
        steps.append(actor.train(0, shard)["steps"])
    for step, expected in steps[0].items():
        for name in steps[1][step].keys() & {
            f"train/{x}" for x in ("loss", "entropy_loss", "pg_clipfrac", "grad_norm")
        }:
            assert steps[1][step][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (step, name)
    assert steps[0][1]["train/grad_norm"] > 0


def test_a_custom_loss_reads_log_probs_among_what_the_sampler_kept(model_dir, tmp_path):
    """Each response token was sampled among its own id and one other."""
    (tmp_path / "losses.py").write_text(LOSSES)
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{tmp_path}/losses.py:by_hand"}
    steps = []
    for overrides in ({}, custom):
        shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
        answers = [t[len(t) - n :] for t, n in zip(shard["tokens"], shard["response_lengths"], strict=True)]
        shard["rollout_top_p_token_ids"] = [torch.stack([ids, (ids + 1) % 260], 1).flatten().int() for ids in answers]
        shard["rollout_top_p_token_offsets"] = [torch.arange(0, 2 * len(ids) + 1, 2).int() for ids in answers]
        actor, _ = start(train_args(model_dir, rollout_top_p=0.9, entropy_coef=0.1, **overrides))
        steps.append(actor.train(0, shard)["steps"][0])
    for name in ("train/loss", "train/pg_clipfrac", "train/grad_norm"):
        assert steps[1][name] == pytest.approx(steps[0][name], rel=1e-5, abs=1e-7), name


def test_log_probs_of_other_tensors_than_the_batchs_are_refused_under_top_p(model_dir, tmp_path):
    (tmp_path / "losses.py").write_text(LOSSES.replace('batch["unconcat_tokens"]', '[t + 0 for t in batch["tokens"]]'))
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{tmp_path}/losses.py:by_hand"}
    actor, _ = start(train_args(model_dir, rollout_top_p=0.9, **custom))
    kept = {
        "rollout_top_p_token_ids": [torch.zeros(0)] * 4,
        "rollout_top_p_token_offsets": [torch.zeros(1 + n).int() for n in (4, 6, 3, 8)],
    }
    with pytest.raises(Exception, match="--rollout-top-p 0.9: get_log_probs_and_entropy needs the samples' tensors"):
        actor.train(0, make_shard(None, **kept))


PROVIDERS = """
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec, get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from slime.backends.megatron_utils.layer_spec import decoder_spec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from slime.backends.megatron_utils.model_provider import get_model_provider_func

def changed(pre_process=True, post_process=True, vp_stage=None):
    model = get_model_provider_func(get_args(), "actor")(pre_process, post_process, vp_stage)
    model.decoder.final_layernorm.weight.requires_grad = False
    return model

def own(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    return gpt(args, config, decoder_spec(config, vp_stage), pre_process, post_process)

def engine_layers(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    config = core_transformer_config_from_args(args)
    spec = get_gpt_layer_with_transformer_engine_spec(args.num_experts, False, args.qk_layernorm, False)
    return gpt(args, config, spec, pre_process, post_process)

class Same(SelfAttention):
    pass

class Half(SelfAttention):
    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return output / 2, bias

def same_layer(args, config, vp_stage):
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.self_attention.module = Same
    return layer

def half_block(args, config, vp_stage):
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = Half
    return block

def own_activation(args, config, vp_stage):
    config.activation_func = torch.nn.functional.gelu
    return same_layer(args, config, vp_stage)

def unknown_argument(args, config, vp_stage):
    return get_gpt_layer_with_transformer_engine_spec(post_mlp_layernorm=True)

def plain_attention(args, config, vp_stage):
    layer = same_layer(args, config, vp_stage)
    layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return layer

def nothing(args, config, vp_stage):
    pass

def cannot_pack(pre_process=True, post_process=True, vp_stage=None):
    args = get_args()
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return gpt(args, core_transformer_config_from_args(args), spec, pre_process, post_process)

def gpt(args, config, spec, pre_process, post_process):
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
    )
"""


@pytest.mark.parametrize("provider", ["changed", "own", "engine_layers"])
def test_a_model_provider_finds_the_arguments_where_megatron_keeps_them(model_dir, tmp_path, provider):
    (tmp_path / "providers.py").write_text(PROVIDERS)
    actor, _ = start(train_args(model_dir, custom_model_provider_path=f"{tmp_path}/providers.py:{provider}"))
    result = actor.train(0, make_shard(None, micro_batches=[[0, 1, 2, 3]]))
    assert result["steps"][0]["train/grad_norm"] > 0


def test_a_model_whose_attention_cannot_read_packed_samples_is_refused(model_dir, tmp_path):
    (tmp_path / "providers.py").write_text(PROVIDERS)
    with pytest.raises(
        ValueError, match="--custom-model-provider-path .*cannot_pack built attention that cannot read several"
    ):
        start(train_args(model_dir, custom_model_provider_path=f"{tmp_path}/providers.py:cannot_pack"))


def test_layers_of_a_plugin_are_trained(model_dir, tmp_path):
    """Equal ones give the numbers of the built-in layers; with other attention the numbers are others."""
    (tmp_path / "plugin.py").write_text(PROVIDERS)
    norms = {}
    for name in (None, "same_layer", "half_block", "own_activation"):
        words = None if name is None else [f"{tmp_path}/plugin.py", name]
        actor, _ = start(train_args(model_dir, spec=words))
        kinds = {type(part).__name__ for part in actor.model[0].modules()}
        assert name is None or kinds & {"Same", "Half"}
        norms[name] = actor.train(0, make_shard(None, micro_batches=[[0, 1, 2, 3]]))["steps"][0]["train/grad_norm"]
    assert norms["same_layer"] == pytest.approx(norms[None], rel=1e-5) and norms[None] > 0
    assert norms["half_block"] != pytest.approx(norms[None], rel=1e-3) != norms["own_activation"]


@pytest.mark.parametrize(
    "name, message", [("plain_attention", "built attention that cannot read"), ("nothing", "returned a NoneType")]
)
def test_layers_that_cannot_be_trained_are_named(model_dir, tmp_path, name, message):
    (tmp_path / "plugin.py").write_text(PROVIDERS)
    with pytest.raises(ValueError, match=f"--spec .*plugin.py:{name} {message}.*expected \\(args, config, vp_stage\\)"):
        start(train_args(model_dir, spec=[f"{tmp_path}/plugin.py:{name}"]))


def test_a_layer_spec_is_not_made_without_what_was_asked_for(model_dir, tmp_path):
    (tmp_path / "plugin.py").write_text(PROVIDERS)
    with pytest.raises(RuntimeError, match="no layer spec with post_mlp_layernorm"):
        start(train_args(model_dir, spec=[f"{tmp_path}/plugin.py:unknown_argument"]))
