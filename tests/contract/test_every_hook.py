"""Every hook: loaded from each spelling, called with the documented arguments, refused with the expected signature.

`SLIME_CONTRACT_<FLAG>` (for example SLIME_CONTRACT_CUSTOM_RM_PATH=my_rm.py:score) names a hook of yours to be checked as well.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from slime.batching.convert import convert_samples_to_train_data
from slime.config.registry import framework_flags
from slime.ray.rollout_manager import RolloutManager
from slime.rollout.data_source import create_data_source
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.hook_calls import HookError, check_path
from slime.utils.hook_table import HOOKS
from slime.utils.misc import load_hook
from slime.utils.types import Sample

FILE = Path(__file__).with_name("user_hooks.py")

#: flag -> (signature of the specification, a function of user_hooks.py)
SPEC = {
    "rollout_function_path": ("args, rollout_id, data_source, evaluation=False", "rollout_function"),
    "eval_function_path": ("args, rollout_id, data_source, evaluation=False", "eval_function"),
    "custom_generate_function_path": ("args, sample, sampling_params", "generate"),
    "rollout_sample_hook_path": ("args, sample, *, rollout_id=None, evaluation=False", "sample_hook"),
    "custom_rm_path": ("args, sample, **kwargs", "custom_rm"),
    "dynamic_sampling_filter_path": ("args, samples, **kwargs", "dynamic_sampling_filter"),
    "round_policy_path": ("args", None),
    "buffer_filter_path": ("args, rollout_id, buffer, num_samples", "buffer_filter"),
    "rollout_sample_filter_path": ("args, groups", "rollout_sample_filter"),
    "rollout_all_samples_process_path": ("args, all_groups, data_source", "rollout_all_samples_process"),
    "data_source_path": ("args", "Prompts"),
    "custom_reward_post_process_path": ("args, samples, **kwargs", "reward_post_process"),
    "custom_convert_samples_to_train_data_path": ("args, samples", "convert_samples_to_train_data"),
    "custom_rollout_log_function_path": (
        "rollout_id, args, samples, rollout_extra_metrics, rollout_time",
        "rollout_log",
    ),
    "custom_eval_rollout_log_function_path": ("rollout_id, args, data, extra_metrics", "eval_rollout_log"),
    "rollout_data_postprocess_path": ("args, rollout_id, rollout_data", "rollout_data_postprocess"),
    "custom_advantage_function_path": ("args, rollout_data", "advantage_function"),
    "custom_loss_function_path": ("args, batch, logits, sum_of_sample_mean", "loss_function"),
    "custom_tis_function_path": (
        "args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths",
        "tis_function",
    ),
    "custom_pg_loss_reducer_function_path": (
        "total_lengths, response_lengths, loss_masks, calculate_per_token_loss",
        "pg_loss_reducer_function",
    ),
    "custom_megatron_init_path": ("args", "megatron_init"),
    "custom_megatron_before_log_prob_hook_path": ("args, model, store_prefix", "megatron_before_log_prob_hook"),
    "custom_megatron_before_train_step_hook_path": (
        "args, rollout_id, step_id, model, optimizer, opt_param_scheduler",
        "megatron_before_train_step_hook",
    ),
    "custom_model_provider_path": ("pre_process, post_process, vp_stage=None", "model_provider"),
    "custom_update_weight_post_write_path": ("args, version_dir, rollout_engines", "update_weight_post_write"),
    "advantage_estimator": ("inputs", "estimator"),
    "spec": ("args, config, vp_stage", "layer_spec"),
}
CLASSES = ("round_policy_path", "data_source_path")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """``write(text)`` puts a module into the working folder and gives its name."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)

    def file(text: str) -> str:
        name = f"hooks_{len(list(tmp_path.glob('*.py')))}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield file
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture(params=["plain", "async"])
def hooks(request, write):
    """The hooks' file, its functions async or not, and the list of their calls: ``(file, calls)``."""
    text = FILE.read_text()
    if request.param == "async":
        text = re.sub(r"^def (?!note|made)", "async def ", text, flags=re.M)
    file = os.path.abspath(f"{write(text)}.py")
    return file, load_hook(f"{file}:calls", None)


# ---- loading and signatures ------------------------------------------------------------------------------------------


def test_every_hook_flag_has_a_row():
    flags = {flag.dest for flag in framework_flags() if flag.type == "hook" and flag.status == "live"}
    assert flags | {"advantage_estimator", "spec"} == set(HOOKS) == set(SPEC)


def test_yours_is_found_and_can_be_called():
    given = {name: path for name, path in os.environ.items() if name.startswith("SLIME_CONTRACT_")}
    for name, path in given.items():
        option = name.removeprefix("SLIME_CONTRACT_").lower()
        assert option in SPEC, f"{name}: no hook has this flag; {', '.join(sorted(SPEC)).upper()} have one"
        check_path(path, option)


@pytest.mark.parametrize("option", SPEC)
def test_the_documented_signature_is_taken_from_every_spelling_and_any_other_is_refused(option, write):
    signature, _ = SPEC[option]
    usual = option.removeprefix("custom_").removesuffix("_path")
    usual = {"custom_rm_path": "custom_rm", "custom_generate_function_path": "generate"}.get(option, usual)
    methods = "".join(f"    def {name}(self, *_): ...\n" for name in HOOKS[option].methods)
    source = f"class {usual}:\n    def __init__(self, {signature}): ...\n{methods}"
    bodies = (
        [source]
        if option in CLASSES
        else [f"def {usual}({signature}): ...\n", f"async def {usual}({signature}): ...\n"]
    )
    for body in bodies:
        name = write(body)
        found = {load_hook(path, option) for path in (f"{name}.{usual}", f"{name}.py:{usual}", f"{name}.py")}
        assert len(found) == 1
        check_path(f"{name}.py", option)
    wrong = ["def f(): ...", "def f(*args, never_given, **kwargs): ...", "f = 3"]
    if option in CLASSES:
        wrong = [f"class f:\n    def __init__(self, args, never_given): ...\n{methods}", "class f: ...", "f = 3"]
    for text in wrong:
        with pytest.raises(ValueError) as error:
            check_path(f"{write(text)}.py:f", option)
        message = str(error.value)
        assert message.startswith(f"--{option.replace('_', '-')} "), message
        assert HOOKS[option].text in message or "neither (args, sample, sampling_params" in message, message


@pytest.mark.parametrize("option", sorted(set(SPEC) - set(CLASSES)))
def test_generators_and_classes_in_place_of_functions_are_refused(option, write):
    signature, _ = SPEC[option]
    for text, why in (
        (f"async def f({signature}):\n    yield 1\n", "is a generator: use return, not yield"),
        (f"class f:\n    def __init__(self, {signature}): ...\n", "is a class"),
    ):
        with pytest.raises(ValueError, match=why):
            check_path(f"{write(text)}.py:f", option)


DECORATOR = """import functools
def with_client(f):
    @functools.wraps(f)
    def call(*args, **kwargs): return f(*args, client=1, **kwargs)
    return call
def narrow(f):
    @functools.wraps(f)
    def call(args): return f(args)
    return call
"""


def test_arguments_that_a_decorator_gives_are_not_missing(write, caplog):
    name = write(f"{DECORATOR}@with_client\ndef f(args, sample, sampling_params, client): return sample, client\n")
    check_path(f"{name}.f", "custom_generate_function_path")
    assert "missing a required argument: 'client'" in caplog.text and "its decorator has to give" in caplog.text
    assert load_hook(f"{name}.f", "custom_generate_function_path")(None, 2, {}) == (2, 1)
    for text in (f"{DECORATOR}@narrow\ndef f(args): ...\n", "import functools\n@functools.cache\ndef f(args): ...\n"):
        with pytest.raises(ValueError, match="too many positional arguments"):
            check_path(f"{write(text)}.py:f", "dynamic_sampling_filter_path")


@pytest.mark.parametrize(
    "kind", ["functools.partial(f, 1)", "lambda *a, **k: f(1, *a, **k)", "Callable()", "Callable().method"]
)
def test_callable_objects_are_hooks_too(kind, write):
    text = "import functools\ndef f(one, args, samples): return True\n"
    text += "class Callable:\n    def __call__(self, args, samples): return True\n    method = __call__\n"
    name = write(f"{text}keep = {kind}\nholder = Callable()\n")
    check_path(f"{name}.keep", "dynamic_sampling_filter_path")
    check_path(f"{name}.py:holder.method", "dynamic_sampling_filter_path")
    assert load_hook(f"{name}.keep", "dynamic_sampling_filter_path")(None, []) is True


# ---- the rollout side ------------------------------------------------------------------------------------------------


def at(file: str, *options: str) -> dict:
    paths = {option: f"{file}:{SPEC[option][1]}" for option in options}
    return {option: [path] if option == "rollout_sample_hook_path" else path for option, path in paths.items()}


def test_a_round_calls_its_hooks_in_order_with_their_arguments(hooks, engine, make_args):
    file, calls = hooks
    options = (
        "custom_generate_function_path",
        "rollout_sample_hook_path",
        "custom_rm_path",
        "dynamic_sampling_filter_path",
    )
    more = ("buffer_filter_path", "rollout_sample_filter_path", "rollout_all_samples_process_path", "data_source_path")
    source_class = {"data_source_path": "user_hooks.Prompts"}
    args = make_args(engine, n_samples_per_prompt=1, **at(file, *options, *more) | source_class)
    sys.path.insert(0, str(FILE.parent))
    import user_hooks

    user_hooks.calls.clear()
    source = create_data_source(args)
    pushed = [[Sample(prompt="pushed")]]
    source.add_samples(pushed)
    output = generate_rollout(args, 5, source)
    assert user_hooks.calls[0] == ("get_samples", 2) and user_hooks.calls[-1] == ("get_samples", 1)
    assert calls[0] == ("buffer_filter", None, [0], 2)
    per_sample = {
        index: [c for c in calls if c[0] in ("generate", "sample_hook", "rm") and c[1] == index] for index in (0, 1)
    }
    for index, given in per_sample.items():
        assert given == [("generate", index, 16, False), ("sample_hook", index, None, 5, False), ("rm", index, "x")]
    seen = [
        given for name, (given,) in (call[:2] for call in calls if call[0] == "filter")
    ]  # plain hooks run in threads: any order
    assert {(0, 0.0), (1, 1.0)} <= set(seen) <= {(0, 0.0), (1, 1.0), (2, 0.0), (3, 1.0)}
    first_two = sorted([index for index, _ in seen if index != 1][:2])
    assert [group[0].group_index for group in output.samples] == first_two
    end = [call for call in calls if call[0] in ("sample_filter", "all_samples")]
    assert end[0] == ("sample_filter", [[index] for index in first_two])
    assert end[1:] == [("all_samples", sorted(index for index, _ in seen), 1)] and calls[-1] is end[-1]
    assert output.samples[0][0].remove_sample and output.metrics["rollout/dynamic_filter/drop_second"] == 1


def test_forms_for_whole_groups(hooks, engine, make_args):
    file, calls = hooks
    paths = {"custom_generate_function_path": f"{file}:list_generate", "custom_rm_path": f"{file}:group_rm"}
    args = make_args(engine, rollout_batch_size=1, group_rm=True, **paths)
    output = generate_rollout(args, 0, create_data_source(args))
    assert calls == [("list_generate", [0, 1], False), ("group_rm", [0, 1])]
    assert [sample.reward for sample in output.samples[0]] == [0.0, 1.0]


def manager_for(args) -> RolloutManager:
    manager = RolloutManager(args, slots=None, host="127.0.0.1")
    manager._data_source = create_data_source(args)
    return manager


def test_the_manager_calls_rollout_and_log_functions(hooks, make_args):
    file, calls = hooks
    options = [
        name for name in SPEC if name.endswith(("log_function_path", "eval_function_path", "rollout_function_path"))
    ]
    nothing = dict(load_debug_rollout_data=None, save_debug_rollout_data=None)
    manager = manager_for(make_args(**at(file, *options), **nothing))
    groups, extra = manager._groups(3)
    assert groups[0][0].token_spans[0]["source"] == f"{file}:rollout_function"  # what the check of samples will name
    assert manager._rollout_metrics(3, groups, extra, 1.5) == {}
    assert manager.eval(3, 3) == {}
    source = "RolloutDataSourceWithBuffer"
    assert calls == [
        ("rollout", 3, source, False),
        ("log", 3, 2, {"own": 1.0}, 1.5),
        ("eval", 3, source, True),
        ("eval_log", 3, ["held_out"], {}),
    ]


def scored(count: int = 2) -> list[Sample]:
    return [
        Sample(group_index=0, index=i, tokens=[1, 2, 3 + i], response_length=1, loss_mask=[1], reward=float(i))
        for i in range(count)
    ]


def convert_args(make_args, **changes):
    nothing = dict(custom_convert_samples_to_train_data_path=None, check_samples=True, use_tis=False)
    more = dict(use_rollout_logprobs=False, advantage_estimator="grpo", rewards_normalization=False)
    return make_args(**nothing, **more, **changes)


def test_conversion_and_training_rewards_are_the_hooks(hooks, make_args):
    file, calls = hooks
    args = convert_args(make_args, **at(file, "custom_reward_post_process_path"))
    data = convert_samples_to_train_data(args, scored())
    assert (data["raw_reward"], data["rewards"]) == ([0.0, 1.0], [-0.5, 0.5])
    args.custom_convert_samples_to_train_data_path = f"{file}:convert_samples_to_train_data"
    data = convert_samples_to_train_data(args, scored())
    assert calls == [("post_process", [0, 1]), ("convert", [0, 1])]
    assert data["rollout_ids"] == [0, 1] and list(data["rollout_mask_sums"]) == [1, 1]  # which the hook left out


ROUND_ERRORS = [
    (
        "rollout_function_path",
        "args, rollout_id, data_source, evaluation=False",
        "None",
        "returned a NoneType in round 0",
    ),
    (
        "rollout_function_path",
        "args, rollout_id, data_source, evaluation=False",
        "[['x']]",
        "returned a str among the samples",
    ),
    ("rollout_function_path", "args, rollout_id, data_source, evaluation=False", "[]", "returned no groups in round 0"),
    (
        "eval_function_path",
        "args, rollout_id, data_source, evaluation=False",
        "[1.0]",
        "returned a list in evaluation 0",
    ),
    (
        "eval_function_path",
        "args, rollout_id, data_source, evaluation=False",
        "{'a': {}}",
        "no list of rewards for the set 'a'",
    ),
    ("custom_generate_function_path", "args, sample, sampling_params", "None", "returned a NoneType"),
    ("custom_generate_function_path", "args, sample, sampling_params", "[sample, Sample()]", r"rollout_id \['None'\]"),
    (
        "custom_generate_function_path",
        "args, samples, evaluation=False",
        "samples[1:]",
        "returned 1 results for 2 samples",
    ),
    ("custom_generate_function_path", "args, samples, evaluation=False", "[samples[0]] * 2", "returned a sample twice"),
    (
        "custom_generate_function_path",
        "args, sample, sampling_params",
        "Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1])",
        r"(?s)lists do not fit: sample 0: loss_mask covers response tokens \[0:1\).*from .*hooks_0.py:f",
    ),
    ("rollout_sample_hook_path", "args, sample", "3", "returned a int"),
    ("custom_rm_path", "args, sample", "None", "gave no reward: the reward function returned None"),
    ("custom_rm_path", "args, sample", "'good'", "gave no reward: the reward is no number: 'good'"),
    ("custom_rm_path", "args, samples", "[1.0]", r"returned \[1.0\] for 2 samples"),
    ("dynamic_sampling_filter_path", "args, samples", "None", "returned a NoneType"),
    ("dynamic_sampling_filter_path", "args, samples", "samples", "returned a list"),
    ("buffer_filter_path", "args, rollout_id, buffer, num_samples", "None", "returned a NoneType"),
    (
        "buffer_filter_path",
        "args, rollout_id, buffer, num_samples",
        "buffer[:1]",
        "left 1 of the groups that it returned",
    ),
    (
        "buffer_filter_path",
        "args, rollout_id, buffer, num_samples",
        "[[Sample()]] * 9",
        "returned 9 groups when asked for 2",
    ),
    ("custom_reward_post_process_path", "args, samples", "None", r"returned nothing \(None\)"),
    (
        "custom_reward_post_process_path",
        "args, samples",
        "([1.0], [1.0])",
        "returned a list of 1 as raw rewards of 4 samples",
    ),
    (
        "custom_reward_post_process_path",
        "args, samples",
        "([0] * 4, [float('nan')] * 4)",
        "training reward nan for sample 0",
    ),
    ("custom_convert_samples_to_train_data_path", "args, samples", "[]", "returned a list of 0"),
    (
        "custom_convert_samples_to_train_data_path",
        "args, samples",
        "{'tokens': [[1]]}",
        "without response_lengths, rewards",
    ),
]


@pytest.mark.parametrize("option, signature, value, message", ROUND_ERRORS, ids=lambda text: text[:40])
def test_what_hooks_of_the_rollout_return_is_refused_by_flag_with_the_expected_signature(
    engine, make_args, write, option, signature, value, message
):
    async_or_plain = "async def" if len(message) % 2 else "def"
    file = os.path.abspath(
        write(f"from slime.utils.types import Sample\n{async_or_plain} f({signature}):\n    return {value}\n")
    )
    path = f"{file}.py:f"
    nothing = dict(load_debug_rollout_data=None, save_debug_rollout_data=None)
    paths = {"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout", "eval_function_path": None}
    paths |= {option: [path] if option == "rollout_sample_hook_path" else path}
    args = convert_args(
        lambda **given: make_args(engine, **{**nothing, **paths, **given}), group_rm=signature == "args, samples"
    )
    setattr(args, option, paths[option])

    def run():
        manager = manager_for(args)
        manager._data_source.add_samples([[Sample(prompt="p"), Sample(prompt="p")]])
        if option == "eval_function_path":
            manager.eval(0, 0)
        groups, _ = manager._groups(0)
        convert_samples_to_train_data(args, [sample for group in groups for sample in group])

    with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as error:
        run()
    assert f"--{option.replace('_', '-')} {path} " in str(error.value) and HOOKS[option].text in str(error.value)


@pytest.mark.parametrize(
    "option",
    [name for name, (_, used) in SPEC.items() if used and name in list(SPEC)[:15] and name != "data_source_path"],
)
def test_what_a_hook_raises_is_named_with_the_place_in_it(engine, make_args, write, option):
    signature, _ = SPEC[option]
    text = f"def helper():\n    raise KeyError('mine')\ndef f({signature}):\n    helper()\n"
    path = f"{os.path.abspath(write(text))}.py:f"
    nothing = dict(load_debug_rollout_data=None, save_debug_rollout_data=None)
    paths = {
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "custom_rollout_log_function_path": f"{FILE}:rollout_log",
        "custom_eval_rollout_log_function_path": None,
    }
    paths |= {
        "eval_function_path": f"{FILE}:eval_function",
        option: [path] if option == "rollout_sample_hook_path" else path,
    }
    args = convert_args(lambda **given: make_args(engine, **{**nothing, **paths, **given}))
    setattr(args, option, paths[option])
    manager = manager_for(args)
    manager._data_source.add_samples([[Sample(prompt="p"), Sample(prompt="p")]])
    with pytest.raises(RuntimeError) as error:
        groups, extra = manager._groups(0)
        manager._rollout_metrics(0, groups, extra, 1.0)
        convert_samples_to_train_data(args, [sample for group in groups for sample in group])
        manager.eval(0, 0)
    text = str(error.value)
    assert "KeyError: 'mine'" in text and "in helper" in text and "line 2" in text
    if option != "custom_rm_path":  # its failures are counted per sample; a round of nothing else ends the run
        assert isinstance(error.value, HookError)
        assert text.startswith(f"--{option.replace('_', '-')} {path} raised KeyError: 'mine'")


# ---- the trainer's side ----------------------------------------------------------------------------------------------


def trainer_args(**paths):
    from types import SimpleNamespace

    values = dict.fromkeys(SPEC) | {"calculate_per_token_loss": False}
    return SimpleNamespace(**(values | paths))


ROWS = dict(total_lengths=[4, 5], response_lengths=[2, 3])


def rollout_data() -> dict:
    masks = [torch.ones(2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)]
    columns = {name: [mask.float() for mask in masks] for name in ("advantages", "returns", "log_probs")}
    return {"loss_masks": masks, "response_lengths": [2, 3], **columns}


def call_trainer_hook(option: str, path: str):
    """Call the trainer's hook as the trainer does and give back what it makes of the answer."""
    from slime.algorithms.advantages import AdvantageInputs, compute
    from slime.backends.megatron_utils import hook_results

    args, data = trainer_args(**{option: path}), rollout_data()
    masks = data["loss_masks"]
    if option == "rollout_data_postprocess_path":
        hook_results.postprocess(args, 6, data)
        return data["advantages"][0].tolist()
    if option == "custom_advantage_function_path":
        del data["advantages"], data["returns"]
        hook_results.advantages(args, data)
        return data["advantages"][0].tolist()
    if option == "advantage_estimator":
        inputs = AdvantageInputs([2.0, 3.0], [2, 3], masks, kl=[mask.float() for mask in masks], values=None)
        return compute(path, inputs)[0][0].tolist()
    if option == "custom_loss_function_path":
        logits = torch.ones(1, 9, 4, requires_grad=True)
        loss, metrics = hook_results.loss(args, data | {"tokens": []}, logits, lambda tokens: tokens.sum())
        return loss.item(), metrics["own"].item()
    if option == "custom_tis_function_path":
        rows = dict(train_log_probs=data["log_probs"], rollout_log_probs=data["log_probs"])
        corrected, _, _ = hook_results.tis(args, pg_loss=torch.ones(5), loss_masks=masks, **rows, **ROWS)
        return corrected.tolist()
    if option == "custom_pg_loss_reducer_function_path":
        return hook_results.reducer(args, [4, 5], [2, 3], masks)(torch.ones(7)).item()
    return type(hook_results.model(args, pre_process=True, post_process=True, vp_stage=1)).__name__


TRAINER = {
    "rollout_data_postprocess_path": (("data_postprocess", 6, ["advantages", "log_probs"]), [2.0, 2.0]),
    "custom_advantage_function_path": (("advantage", False), [1.0, 1.0]),
    "advantage_estimator": (("estimator", [2, 3]), [2.0, 2.0]),
    "custom_loss_function_path": (("loss", ["advantages", "tokens"], (1, 9, 4)), (2.0, 3.0)),
    "custom_tis_function_path": (("tis", (5,), 2, 2, [4, 5], [2, 3]), [0.5] * 5),
    "custom_pg_loss_reducer_function_path": (("reducer", [4, 5], [2, 3], 2, False), 1.0),
    "custom_model_provider_path": (("model_provider", True, True, 1), "Linear"),
}  # those that return nothing: the one of a weight write is below, the three around Megatron in tests/unit/megatron/test_training.py


@pytest.mark.parametrize("option", TRAINER)
def test_hooks_of_the_trainer_get_their_arguments(option, hooks):
    file, calls = hooks
    given, result = TRAINER[option]
    assert call_trainer_hook(option, f"{file}:{SPEC[option][1]}") == result
    assert calls == [given]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_trainer_rank_calls_the_hook_of_a_weight_write_when_the_folder_is_complete(hooks, tmp_path, rank):
    from types import SimpleNamespace

    from slime.ray.train_actor import TrainActor

    file, calls = hooks
    paths = at(file, "custom_update_weight_post_write_path")
    more = dict(lora_base=None, hf_checkpoint=None, update_weight_disk_dir=str(tmp_path), distributed_timeout_minutes=1)
    actor = TrainActor(SimpleNamespace(**paths, **more), rank, 2, "127.0.0.1")
    actor._actor = SimpleNamespace(save_hf=lambda path: calls.append(("written", path)))
    urls, folder = ["http://127.0.0.1:1", "http://127.0.0.1:2"], str(tmp_path / "weight_v000007")
    actor.write_weights(urls, 7)
    assert calls == [("written", folder), ("post_write", folder, urls)]


TRAINER_ERRORS = [
    ("rollout_data_postprocess_path", "rollout_data.pop('advantages')", "removed advantages"),
    (
        "rollout_data_postprocess_path",
        "rollout_data['log_probs'].pop()",
        r"left log_probs of shapes \[\(2,\)\] for responses",
    ),
    ("custom_advantage_function_path", "None", "did not set advantages"),
    (
        "custom_advantage_function_path",
        "rollout_data.update(advantages=[1.0, 2.0])",
        r"advantages of shapes \['a float', 'a float'\]",
    ),
    (
        "advantage_estimator",
        "inputs.rewards",
        r"returned advantages of shapes float, the responses have \[2, 3\] tokens",
    ),
    ("advantage_estimator", "None", "returned a NoneType"),
    ("custom_loss_function_path", "logits.sum()", "returned a Tensor"),
    ("custom_loss_function_path", "(logits, {})", r"Tensor of shape \(1, 9, 4\) as the loss, which is no scalar"),
    ("custom_loss_function_path", "(logits.detach().sum(), {})", "without gradient"),
    ("custom_tis_function_path", "pg_loss", "returned a Tensor"),
    ("custom_tis_function_path", "(pg_loss, loss_masks, {'mean': pg_loss.mean()})", r"returned mean of shape \(\)"),
    (
        "custom_tis_function_path",
        "(pg_loss[:1], loss_masks, {})",
        r"returned pg_loss of shape \(1,\), pg_loss has \(5,\)",
    ),
    ("custom_pg_loss_reducer_function_path", "None", "returned a NoneType"),
    ("custom_pg_loss_reducer_function_path", "(lambda tokens: tokens)", "returned a Tensor, which is no scalar tensor"),
    ("custom_model_provider_path", "None", "returned a NoneType"),
]


@pytest.mark.parametrize("option, value, message", TRAINER_ERRORS, ids=lambda text: text[:40])
def test_what_hooks_of_the_trainer_return_is_refused_by_flag_with_the_expected_signature(option, value, message, write):
    signature, _ = SPEC[option]
    path = f"{os.path.abspath(write(f'def f({signature}):{chr(10)}    return {value}{chr(10)}'))}.py:f"
    with pytest.raises(ValueError, match=message) as error:
        call_trainer_hook(option, path)
    assert f"--{option.replace('_', '-')} {path} " in str(error.value) and HOOKS[option].text in str(error.value)


def test_the_reference_hooks_have_the_documented_signatures():
    """The table above and the hooks of this folder say the same."""
    for option, (signature, name) in SPEC.items():
        if name and option not in CLASSES:
            exec(f"def spec({signature}): ...", space := {})
            wanted = [p.name for p in inspect.signature(space["spec"]).parameters.values() if p.kind != p.VAR_KEYWORD]
            found = list(inspect.signature(load_hook(f"{FILE}:{name}", option)).parameters)
            assert found[: len(wanted)] == wanted, option
