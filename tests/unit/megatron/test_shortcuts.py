"""Megatron's detours are left out where they mean nothing, and the numbers are the same without them."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils import optimizer as optimizer_module
from slime.backends.megatron_utils import shortcuts
from slime.backends.megatron_utils.optimizer_fixes import parts
from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), arch="qwen2", init_std=0.1)


# A large epsilon keeps Adam from magnifying rounding where a gradient is nearly zero.
ADAM = dict(lr=1e-2, adam_eps=1e-3, clip_grad=0.05, weight_decay=0.1)


def trained(model_dir, **flags):
    """Weights and reports of three rounds with Adam and clipping."""
    from slime.backends.megatron_utils.actor import MegatronActor

    actor = MegatronActor(train_args(model_dir, **{**ADAM, **flags}), 0, 1, "127.0.0.1", 0)
    actor.init()
    steps = [actor.train(i, make_shard(None, micro_batches=[[0, 1], [2, 3]], seed=i))["steps"][i] for i in range(3)]
    return {name: tensor.clone() for name, tensor in actor.export_weights()}, steps, actor


@pytest.fixture
def detours(monkeypatch):
    """Megatron as it comes."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    shortcuts.plain_linears()
    monkeypatch.setattr(layers, "linear_with_grad_accumulation_and_async_allreduce", layers._slow_linear)
    monkeypatch.setattr(layers, "copy_to_tensor_model_parallel_region", layers._slow_copy)
    monkeypatch.setattr(layers, "reduce_from_tensor_model_parallel_region", layers._slow_reduce)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    monkeypatch.setattr(clip_grads, "to_local_if_dtensor", utils.to_local_if_dtensor)
    for name in ("skip_lonely", "list_kernels", "fuse_adam"):
        monkeypatch.setattr(optimizer_module.shortcuts, name, lambda x=None: None)


def fused(actor) -> list[bool]:
    return [bool(group["fused"]) for part in parts(actor.optimizer) for group in part.optimizer.param_groups]


@pytest.mark.parametrize("flags", [{}, {"use_distributed_optimizer": False}], ids=str)
def test_three_rounds_give_the_same_numbers(model_dir, flags, request):
    weights, steps, fast = trained(model_dir, **flags)
    assert all(fused(fast))
    request.getfixturevalue("detours")
    expected, expected_steps, slow = trained(model_dir, **flags)
    assert not any(fused(slow))
    for got, wanted in zip(steps, expected_steps, strict=True):
        assert got == pytest.approx(wanted, abs=1e-5, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=1e-4)


def test_a_step_in_bf16_differs_by_rounding_only(model_dir, request):
    steps = trained(model_dir, precision="bf16")[1]
    request.getfixturevalue("detours")
    expected = trained(model_dir, precision="bf16")[1]
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert steps[0][name] == pytest.approx(expected[0][name], rel=0.02, abs=0.01), name


def test_gradients_still_are_scaled_in_a_group_of_one_rank(model_dir):
    _, _, actor = trained(model_dir)
    groups = actor.model[0].bucket_groups
    assert groups and all(group.start_grad_sync.func is shortcuts._only_scale for group in groups)
    bucket = groups[0].buckets[0]
    bucket.grad_data.fill_(2.0)
    bucket.gradient_scaling_factor = 0.5
    groups[0].start_grad_sync()
    assert bool((bucket.grad_data == 1.0).all())


def test_pinned_version_still_has_every_replaced_name():
    import inspect

    from megatron.core import utils
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    linear = layers.ColumnParallelLinear._forward_impl
    assert "linear_with_grad_accumulation_and_async_allreduce(input, weight, *args" in inspect.getsource(linear)
    forwards = inspect.getsource(layers.ColumnParallelLinear.forward) + inspect.getsource(
        layers.RowParallelLinear.forward
    )
    assert "= copy_to_tensor_model_parallel_region(input_, group=" in forwards
    assert "= reduce_from_tensor_model_parallel_region(output_parallel, group=" in forwards
    assert "self.start_grad_sync(force_all_reduce=force_all_reduce)" in inspect.getsource(
        _ParamAndGradBucketGroup.finish_grad_sync
    )
    assert hasattr(_ParamAndGradBucketGroup, "start_param_sync")
    assert callable(utils.local_multi_tensor_l2_norm) and callable(utils.local_multi_tensor_scale)
    assert "l2_norm_impl," in inspect.getsource(clip_grads.get_grad_norm_fp32)
    assert "multi_tensor_scale_impl, " in inspect.getsource(clip_grads.clip_grad_by_total_norm_fp32)


def test_list_kernels_equal_the_loops():
    from megatron.core import utils

    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 7, 300)]
    norm = shortcuts._l2_norm(0, None, [tensors], False)[0]
    torch.testing.assert_close(norm, torch.cat(tensors).norm().reshape(1))
    targets = [torch.zeros_like(t) for t in tensors]
    shortcuts._scale(0, None, [tensors, targets], 0.5)
    slow = [torch.zeros_like(t) for t in tensors]
    utils.local_multi_tensor_scale(0, None, [tensors, slow], 0.5)
    assert all(torch.equal(a, b) for a, b in zip(targets, slow, strict=True))
    shortcuts._scale(0, None, [tensors, tensors], 0.5)
    assert all(torch.equal(a, b) for a, b in zip(tensors, slow, strict=True))


def test_communicating_and_fused_linears_go_megatrons_way():
    called = []
    slow = lambda *args, **kwargs: called.append(args)  # noqa: E731
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    torch.testing.assert_close(
        shortcuts._linear(slow, x, w, None, False, False, False, tp_group=None), torch.full((2, 4), 3.0)
    )
    for fusion, reduce, sequence, buffer in ((1, 0, 0, None), (0, 1, 0, None), (0, 0, 1, None), (0, 0, 0, [])):
        shortcuts._linear(slow, x, w, None, fusion, reduce, sequence, buffer)
    assert len(called) == 4


def test_megatrons_own_linear_still_runs_behind_the_replacement():
    """It keeps a flag under the global name that now is ours."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import layers

    shortcuts.plain_linears()
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    group = mpu.get_tensor_model_parallel_group()
    out = layers.linear_with_grad_accumulation_and_async_allreduce(x, w, None, False, True, False, tp_group=group)
    torch.testing.assert_close(out, torch.full((2, 4), 3.0))
    out.sum().backward()
    assert x.grad.tolist() == [[4.0] * 3] * 2
