"""Low-rank adapters: PEFT's numbers, trained alone, saved and loaded in PEFT's format, several at once."""

import json

import pytest
import torch

from slime.utils import peft_format
from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SGD = dict(optimizer="sgd", lr=1.0, clip_grad=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def lora_args(model_dir, **flags):
    base = dict(lora_rank=4, lora_alpha=8.0, target_modules=ALL, lora_base=str(model_dir), lora_adapter_path={})
    return train_args(model_dir, **{**base, **flags})


def start(args, load_dir=None):
    from slime.backends.megatron_utils.actor import MegatronActor

    actor = MegatronActor(args, 0, 1, "127.0.0.1", 0)
    actor.init(load_dir)
    return actor


def peft_folder(folder, model_dir, targets=ALL, seed=0):
    """An adapter made by PEFT itself, with random factors."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(folder)
    return str(folder)


def with_peft(model_dir, folder, trainable=False):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir)
    return PeftModel.from_pretrained(base, folder, is_trainable=trainable)


def log_probs(actor, shard):
    from slime.backends.megatron_utils.data import ShardBatches
    from slime.backends.megatron_utils.log_probs import log_prob_pass

    return log_prob_pass(actor.args, actor.model, ShardBatches(shard, 1, torch.device("cpu")))["log_probs"]


def log_probs_of(hf, shard):
    rows = []
    for ids, length in zip(shard["tokens"], shard["response_lengths"], strict=True):
        logits = hf(ids[None]).logits[0, :-1].float()
        rows.append(torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[-length:, 0])
    return rows


def gradients(actor, shard):
    """Gradients of the first step, by PEFT name."""
    from slime.backends.megatron_utils import lora

    actor.train(0, shard)
    adapters = lora.adapters_of(actor.model[0])
    return {
        name: {peft_format.tensor_name(m, f): p.main_grad.clone() for m, f, p in adapters.factors(name)}
        for name in actor.args.lora_adapters
    }


def assert_close(ours, theirs, atol=2e-6):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("arch, targets", [("qwen3", ALL), ("qwen2", ["q_proj", "up_proj", "o_proj"]), ("llama", ALL)])
def test_log_probs_and_gradients_are_those_of_peft(tmp_path, arch, targets):
    model_dir = make_tiny_model(tmp_path / "model", arch=arch, init_std=0.1)
    folder = peft_folder(tmp_path / "adapter", model_dir, targets)
    args = lora_args(model_dir, target_modules=targets, lora_adapter_path={"actor": folder}, **SGD)
    actor, shard = start(args), make_shard(None, micro_batches=[[0, 1], [2, 3]])
    theirs = with_peft(model_dir, folder, trainable=True)
    rows = log_probs_of(theirs, shard)
    for ours, expected in zip(log_probs(actor, shard), rows, strict=True):
        torch.testing.assert_close(ours, expected.detach(), atol=1e-5, rtol=0)
    loss = -sum(reward * row.mean() for reward, row in zip(shard["rewards"], rows, strict=True)) / len(rows)
    loss.backward()
    expected = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert len(expected) == 2 * 2 * len(targets)
    assert_close(gradients(actor, shard)["actor"], expected)


def test_adapters_alone_are_trained(model_dir):
    actor = start(lora_args(model_dir))
    before = {name: tensor.clone() for name, tensor in actor.export_base()}
    merged = dict(actor.export_weights())
    assert all(torch.equal(before[name], merged[name]) for name in before)  # B starts at zero
    for rollout_id in range(2):
        actor.train(rollout_id, make_shard(None))
    assert all(torch.equal(before[name], tensor) for name, tensor in actor.export_base())
    moved = {name for name, tensor in actor.export_weights() if not torch.equal(before[name], tensor)}
    assert len(moved) == 2 * len(ALL)
    size = sum(tensor.numel() for tensor in actor.export_adapters()["actor"].values())
    held = sum(buffer.grad_data.numel() for buffer in actor.model[0].buffers)
    assert size <= held <= size + 256  # gradient memory is that of the adapters, but for padding
    state = [p for part in actor.optimizer.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]]
    assert sum(p.numel() for p in state) == size


def test_peft_loads_what_is_saved_and_the_merged_export_is_the_same_model(model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    actor, shard = start(lora_args(model_dir, lr=1e-2)), make_shard(None)
    for rollout_id in range(3):
        actor.train(rollout_id, shard)
    ours = log_probs(actor, shard)
    directory = tmp_path / "iter_0000002"
    directory.mkdir()
    actor.save(str(directory))
    actor.save_hf(str(tmp_path / "merged"))
    with torch.no_grad():
        loaded = log_probs_of(with_peft(model_dir, directory / "adapters" / "actor"), shard)
        merged = log_probs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), shard)
        base = log_probs_of(AutoModelForCausalLM.from_pretrained(model_dir), shard)
    for rows in (loaded, merged):
        for a, b in zip(ours, rows, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, base, strict=True)) > 0.1
    again = start(lora_args(model_dir, lora_adapter_path={"actor": str(directory / "adapters" / "actor")}))
    for a, b in zip(log_probs(again, shard), ours, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_goes_on_exactly(model_dir, tmp_path, precision):
    flags = dict(precision=precision, use_kl_loss=True, kl_loss_coef=0.1, lr=1e-2, ref_update_interval=2)
    actor, shard = start(lora_args(model_dir, **flags)), make_shard(None, micro_batches=[[0, 1], [2, 3]])
    directory = tmp_path / "iter_0000001"
    directory.mkdir()
    for rollout_id in range(2):
        actor.train(rollout_id, shard)
    actor.save(str(directory))
    assert sum(f.stat().st_size for f in directory.glob("*.distcp")) < 500_000  # no base, though it has 0.1 M weights
    resumed = start(lora_args(model_dir, **flags), str(directory))
    for rollout_id in range(2, 5):
        expected, got = (one.train(rollout_id, shard)["steps"][rollout_id] for one in (actor, resumed))
        assert got == expected
    ours, theirs = actor.export_adapters()["actor"], resumed.export_adapters()["actor"]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"lora_rank": 8}, "--lora-rank is 8, checkpoint .* was trained with 4"),
        ({"target_modules": ["q_proj"]}, "--target-modules is .* was trained with"),
        ({"lora_rank": 0}, "holds adapters: --lora-rank 4 trains on"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(model_dir, tmp_path, flags, message):
    (tmp_path / "iter_0000000").mkdir()
    start(lora_args(model_dir)).save(str(tmp_path / "iter_0000000"))
    with pytest.raises(ValueError, match=message):
        start(lora_args(model_dir, **flags), str(tmp_path / "iter_0000000"))


def test_adapters_of_another_base_are_refused(model_dir, tmp_path):
    (tmp_path / "iter_0000000").mkdir()
    start(lora_args(model_dir)).save(str(tmp_path / "iter_0000000"))
    other = make_tiny_model(tmp_path / "other", init_std=0.1, seed=1)
    with pytest.raises(ValueError, match="adapters of the base model .*; the weights of .*other are others"):
        start(lora_args(model_dir, lora_base=str(other)), str(tmp_path / "iter_0000000"))


def test_the_reference_is_the_base_without_a_copy_of_it(model_dir):
    flags = dict(use_kl_loss=True, kl_loss_coef=0.0, kl_loss_type="k1", lr=1e-2)
    actor, shard = start(lora_args(model_dir, **flags)), make_shard(None)
    base = sum(float(row.sum()) for row in log_probs(actor, shard))
    results = [actor.train(rollout_id, shard) for rollout_id in range(3)]
    assert results[0]["steps"][0]["train/kl_loss"] == 0 and results[2]["steps"][2]["train/kl_loss"] != 0
    values = [result["rollout"]["rollout/ref_log_probs"] for result in results]
    assert values == [values[0]] * 3 and values[0] == pytest.approx(
        sum(float(r.mean()) for r in _rows(base, actor, shard)) / 4, abs=1e-5
    )
    kept = sum(tensor.numel() for tensor in actor.backup._copies["ref"])
    assert kept == sum(tensor.numel() for tensor in actor.export_adapters()["actor"].values())


def _rows(base, actor, shard):
    """Log-probs of the base, which the actor's sum `base` was taken from."""
    from slime.backends.megatron_utils import lora

    lora.clear(actor.model)
    rows = log_probs(actor, shard)
    assert sum(float(row.sum()) for row in rows) == pytest.approx(base, abs=1e-4)
    return rows


def test_dropout_acts_in_training_only(model_dir, tmp_path):
    folder = peft_folder(tmp_path, model_dir)
    shard = make_shard(None)
    flags = dict(lora_adapter_path={"actor": folder}, **SGD)
    plain, dropping = start(lora_args(model_dir, **flags)), start(lora_args(model_dir, lora_dropout=0.3, **flags))
    for a, b in zip(log_probs(plain, shard), log_probs(dropping, shard), strict=True):
        assert torch.equal(a, b)
    a, b = gradients(plain, shard)["actor"], gradients(dropping, shard)["actor"]
    flat = [torch.cat([tensor.flatten() for tensor in part.values()]) for part in (a, b)]
    assert 0.3 < torch.nn.functional.cosine_similarity(*flat, dim=0) < 0.999


def test_recomputed_layers_give_the_same_gradient(model_dir, tmp_path):
    flags = dict(lora_adapter_path={"actor": peft_folder(tmp_path, model_dir)}, **SGD)
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    shard = make_shard(None)
    plain = gradients(start(lora_args(model_dir, **flags)), shard)["actor"]
    again = gradients(start(lora_args(model_dir, **flags, **full)), shard)["actor"]
    assert all(bool(tensor.any()) for tensor in plain.values())
    assert_close(again, plain, atol=1e-6)


def test_each_of_two_adapters_gets_its_samples_gradient(model_dir, tmp_path):
    folders = {name: peft_folder(tmp_path / name, model_dir, seed=i) for i, name in enumerate("ab")}
    both = lora_args(model_dir, lora_adapters=("a", "b"), lora_adapter_path=folders, **SGD)
    owners = [0, 1, 1, 0]
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]], adapters=owners)
    actor = start(both)
    rows = log_probs(actor, shard)
    together = gradients(actor, shard)
    for number, name in enumerate("ab"):
        alone = start(lora_args(model_dir, lora_adapter_path={"actor": folders[name]}, **SGD))
        own = [i for i in range(4) if owners[i] == number]
        for i, row in enumerate(log_probs(alone, shard)):
            if i in own:
                torch.testing.assert_close(rows[i], row, atol=1e-5, rtol=0)
        masks = [mask * int(i in own) for i, mask in enumerate(shard["loss_masks"])]
        masked = {**shard, "loss_masks": masks, "rollout_mask_sums": torch.tensor([float(m.sum()) for m in masks])}
        del masked["adapters"]
        assert_close(together[name], gradients(alone, masked)["actor"])


def test_a_shared_prompt_is_read_once_by_each_of_two_adapters(model_dir, tmp_path):
    folders = {name: peft_folder(tmp_path / name, model_dir, seed=i) for i, name in enumerate("ab")}
    flags = dict(lora_adapters=("a", "b"), lora_adapter_path=folders, **SGD)
    shard = make_shard(None, micro_batches=[[0, 1, 2, 3]], adapters=[0, 1, 1, 0])
    prompt = shard["tokens"][0][:5]
    shard["tokens"] = [torch.cat([prompt, t[-n:]]) for t, n in zip(shard["tokens"], (4, 6, 3, 8), strict=True)]
    plain, sharing = (start(lora_args(model_dir, share_prompts=shares, **flags)) for shares in (False, True))
    expected, found = gradients(plain, shard), gradients(sharing, shard)
    for name in "ab":
        assert_close(found[name], expected[name])
    assert sharing._read_tokens == 2 * 5 + 3 + 5 + 2 + 7 and plain._read_tokens == 4 * 5 + 4 + 6 + 3 + 8


def test_experts_have_adapters_of_their_own(tmp_path):
    from transformers import AutoModelForCausalLM

    model_dir = make_tiny_model(tmp_path / "model", arch="qwen3_moe", init_std=0.1)
    actor, shard = start(lora_args(model_dir, lr=1e-2)), make_shard(None)
    for rollout_id in range(3):
        actor.train(rollout_id, shard)
    tensors = actor.export_adapters()["actor"]
    assert any(bool(t.any()) for name, t in tensors.items() if ".mlp.experts.1.down_proj.lora_B" in name)
    actor.save_hf(str(tmp_path / "merged"))
    with torch.no_grad():
        merged = log_probs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), shard)
    for a, b in zip(log_probs(actor, shard), merged, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
    ],
)
def test_folders_that_mean_something_else_are_refused(model_dir, tmp_path, change, message):
    folder = peft_folder(tmp_path, model_dir)
    config = json.loads((tmp_path / peft_format.CONFIG_FILE).read_text())
    (tmp_path / peft_format.CONFIG_FILE).write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        start(lora_args(model_dir, lora_adapter_path={"actor": folder}))


def test_targets_of_folder_and_flags_must_agree(model_dir, tmp_path):
    folder = {"actor": peft_folder(tmp_path, model_dir, ["q_proj", "v_proj"])}
    with pytest.raises(ValueError, match=r"no base_model.*o_proj.*--target-modules"):
        start(lora_args(model_dir, lora_adapter_path=folder))
    with pytest.raises(ValueError, match="v_proj.* is outside --target-modules q_proj"):
        start(lora_args(model_dir, lora_adapter_path=folder, target_modules=["q_proj"]))
