"""The CPU shim replaces names that the pinned megatron-core still has, and leaves torch itself alone."""

import inspect
import subprocess
import sys

import torch


def test_pinned_version_still_has_every_replaced_name():
    import megatron.core
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    assert megatron.core.__version__.startswith("0.16"), (
        "check cpu_compat, optimizer_fixes and checkpoint_writer, then move the pin"
    )
    assert "_set_cuda_rng_state" in inspect.getsource(mcore_random)
    assert "maybe_move_tensor_to_cpu" in inspect.getsource(token_dispatcher)
    assert "_apply_rotary_pos_emb_thd" in inspect.getsource(rope_utils.apply_rotary_pos_emb)
    assert hasattr(DistributedOptimizer, "_set_main_param_and_optimizer_states")
    assert "_results_queue" in inspect.getsource(filesystem_async._get_write_results_queue)
    assert hasattr(TorchDistSaveShardedStrategy, "_get_save_and_finalize_callbacks")
    assert hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data")


def test_shim_is_confined_to_megatron_modules():
    import megatron.core.tensor_parallel.layers as layers

    assert layers.torch is not torch
    assert layers.torch.cuda.current_device() == "cpu"
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_groups_of_one_rank_are_one_group_while_they_are_built(monkeypatch):
    from megatron.core import parallel_state

    from slime.backends.megatron_utils import cpu_compat

    made = []
    monkeypatch.setattr(parallel_state, "create_group", lambda ranks=None, *a, **k: made.append(ranks) or object())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    original = parallel_state.create_group
    with cpu_compat.lone_groups_shared():
        lone = [parallel_state.create_group([0], backend="gloo", group_desc=name) for name in "ab"]
        other = parallel_state.create_group([1])
        pairs = [parallel_state.create_group([0, 1]) for _ in range(2)]
    assert lone[0] is lone[1] is not other and pairs[0] is not pairs[1]
    assert made == [[0], [1], [0, 1], [0, 1]] and parallel_state.create_group is original
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with cpu_compat.lone_groups_shared():
        assert parallel_state.create_group([0]) is torch.distributed.group.WORLD and len(made) == 4


def test_install_after_megatron_says_what_is_wrong():
    code = (
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from slime.backends.megatron_utils import cpu_compat\n"
        "try: cpu_compat.install()\n"
        "except AssertionError as e: print(e)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "must run before megatron.core is imported" in out.stdout, out.stderr
