import pytest

from slime.utils.hook_forms import accepted_keywords, generate_form, reward_form
from slime.utils.misc import (
    Box,
    SingletonMeta,
    group_by,
    hook_attribute_path,
    load_function,
    load_hook,
    should_run_periodic_action,
)


def test_dotted_path_splits_at_the_last_dot():
    assert load_function("os.path.join") is __import__("os").path.join


def test_fb_o12_module_of_the_working_folder_is_imported_once_under_every_spelling(folder):
    (folder / "my_rm.py").write_text(
        "calls = []\ndef reward(args, sample):\n    calls.append(1)\n    return len(calls)\n"
    )
    first, second = load_function("my_rm.reward"), load_function(f"{folder}/my_rm.py:reward")
    assert first is second is load_function("my_rm.reward")
    assert (first(None, None), second(None, None)) == (1, 2)


def test_file_loaded_first_is_shared_with_the_dotted_path(folder):
    (folder / "late_rm.py").write_text("def reward(args, sample): ...\n")
    assert load_function("late_rm.py:reward") is load_function("late_rm.reward")


def test_fb_o12_error_shows_flag_path_and_search_path(folder):
    with pytest.raises(
        ImportError, match=r"--custom-rm-path: cannot import 'no_such.reward'.*searched working folder " + str(folder)
    ):
        load_hook("no_such.reward", "custom_rm_path")
    (folder / "half.py").write_text("def other(): ...\n")
    with pytest.raises(AttributeError, match=r"--custom-rm-path: 'half.reward'.*it defines \['other'\]"):
        load_hook("half.reward", "--custom-rm-path")
    with pytest.raises(ImportError, match="no file"):
        load_hook("missing.py:f", "custom_rm_path")


@pytest.mark.parametrize(
    "option, body, name",
    [
        ("custom_generate_function_path", "async def custom_generate(args, samples): ...", "custom_generate"),
        ("custom_generate_function_path", "async def generate(args, sample, sampling_params): ...", "generate"),
        ("custom_rm_path", "async def reward_func(args, sample): ...", "reward_func"),
        ("custom_rm_path", "class CustomRewardModel: ...", "CustomRewardModel"),
        ("data_source_path", "class Mine:\n    def get_samples(self, n): ...", "Mine"),
        ("dynamic_sampling_filter_path", "def dynamic_sampling_filter(args, samples): ...", "dynamic_sampling_filter"),
        ("buffer_filter_path", "def buffer_filter(args, rollout_id, buffer, num_samples): ...", "buffer_filter"),
    ],
)
def test_bare_file_finds_the_attribute_by_option(folder, option, body, name):
    (folder / "hook.py").write_text(body + "\n")
    assert load_hook("hook.py", option).__name__ == name
    assert hook_attribute_path("hook.py", option) == f"{folder}/hook.py:{name}"
    assert load_function(hook_attribute_path("hook.py", option)) is load_hook("hook.py", option)


def test_bare_file_with_several_or_no_candidates_lists_them(folder):
    (folder / "two.py").write_text(
        "class A:\n    def get_samples(self): ...\nclass B:\n    def get_samples(self): ...\n"
    )
    with pytest.raises(AttributeError, match=r"more than one candidate.*\['A', 'B'\]"):
        load_hook("two.py", "data_source_path")
    (folder / "none.py").write_text("def something(): ...\n")
    with pytest.raises(AttributeError, match=r"no candidate for custom_generate, generate.*\['something'\]"):
        load_hook("none.py", "custom_generate_function_path")
    with pytest.raises(ImportError, match="write file.py:attr"):
        load_function("none.py")


def test_a_file_that_fails_to_import_is_not_left_half_loaded(folder):
    (folder / "broken.py").write_text("raise RuntimeError('boom')\n")
    for _ in range(2):
        with pytest.raises(ImportError, match=r"'broken.py:x': RuntimeError: boom \(in .*broken.py, line 1\)"):
            load_function("broken.py:x")


def test_forms_are_told_by_signature():
    async def upstream(args, sample, sampling_params): ...
    async def upstream_eval(args, sample, params, evaluation=False): ...
    async def seed(args, samples, evaluation=False): ...
    async def seed_renamed(args, batch_of, evaluation=False): ...
    async def neither(args, sample): ...
    async def batch(args, samples, **kwargs): ...

    class Model:
        def compute_reward(self, prompts, responses): ...

    assert [generate_form(f) for f in (upstream, upstream_eval, seed, seed_renamed)] == [
        "sample",
        "sample",
        "list",
        "list",
    ]
    with pytest.raises(ValueError, match="neither"):
        generate_form(neither)
    assert [reward_form(f) for f in (neither, batch, Model)] == ["single", "batch", "class"]
    assert accepted_keywords(seed, {"evaluation": 1, "x": 2}) == {"evaluation": 1}
    assert accepted_keywords(batch, {"evaluation": 1, "x": 2}) == {"evaluation": 1, "x": 2}


def test_periodic_rule():
    assert not should_run_periodic_action(4, None)
    assert [i for i in range(6) if should_run_periodic_action(i, 3)] == [2, 5]
    assert [i for i in range(6) if should_run_periodic_action(i, 4, num_rollout_per_epoch=5)] == [3, 4]
    assert [i for i in range(6) if should_run_periodic_action(i, 4, num_rollout=6)] == [3, 5]


def test_singleton_group_by_and_box():
    class One(metaclass=SingletonMeta):
        def __init__(self, value):
            self.value = value

    assert One(1) is One(2)
    One.clear_instance()
    assert One(3).value == 3
    assert group_by("abca") == {"a": ["a", "a"], "b": ["b"], "c": ["c"]}
    assert Box(5).inner == 5
