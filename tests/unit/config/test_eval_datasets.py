"""Evaluation sets from --eval-prompt-data and --eval-config."""

from __future__ import annotations

import json

import pytest

from slime.utils.eval_config import EvalDatasetConfig


@pytest.fixture
def write(tmp_path):
    def write_file(data) -> str:
        path = tmp_path / "eval.yaml"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write_file


def test_repetition_adds_and_pairs_may_share_one_occurrence(parse, data):
    args = parse("--eval-prompt-data", "aime", data, "--eval-prompt-data", "gsm8k", data, "quiz", data)
    assert [item.name for item in args.eval_datasets] == ["aime", "gsm8k", "quiz"]
    assert args.eval_prompt_data == ["aime", data, "gsm8k", data, "quiz", data]


def test_lone_value_is_a_set_called_aime(parse, data):
    args = parse("--eval-prompt-data", data)
    assert [(item.name, item.path) for item in args.eval_datasets] == [("aime", data)]


def test_odd_number_of_values_is_refused(parse, data):
    with pytest.raises(ValueError, match="--eval-prompt-data needs name path pairs, got 3 values"):
        parse("--eval-prompt-data", "aime", data, "gsm8k")


def test_missing_file_names_the_set(parse):
    with pytest.raises(ValueError, match="--eval-prompt-data: evaluation set aime: .*nowhere.jsonl: no such file"):
        parse("--eval-prompt-data", "aime", "nowhere.jsonl")


def test_values_fall_back_from_set_to_defaults_to_flags(parse, write, data):
    path = write(
        {
            "eval": {
                "defaults": {"top_p": 0.9, "max_response_len": 64, "stop": None},
                "datasets": {
                    "contest": {"path": data, "rm_type": "math", "n_samples_per_eval_prompt": 8},
                    "quiz": {"path": data + "@[0:1]", "temperature": 0.2, "top_p": 0.5},
                },
            }
        }
    )
    args = parse(
        *"--eval-temperature 0.6 --rollout-temperature 0.8 --rollout-top-k 40 --rollout-stop END".split(),
        *["--eval-config", path, "--eval-prompt-data", "ignored", data],
    )
    contest, quiz = args.eval_datasets
    assert (contest.temperature, contest.top_p, contest.top_k, contest.max_response_len) == (0.6, 0.9, 40, 64)
    assert (contest.n_samples_per_eval_prompt, contest.rm_type, contest.stop) == (8, "math", None)
    assert (quiz.temperature, quiz.top_p, quiz.n_samples_per_eval_prompt) == (0.2, 0.5, 1)
    assert quiz.path == data + "@[0:1]"
    assert args.eval_prompt_data == ["contest", data, "quiz", data + "@[0:1]"]


def test_keys_fall_back_to_the_data_keys(parse, data):
    item = parse(*"--input-key q --label-key a --eval-label-key b --eval-prompt-data quiz".split(), data).eval_datasets[
        0
    ]
    assert (item.input_key, item.label_key, item.metadata_key, item.tool_key) == ("q", "b", "metadata", "tools")


def test_datasets_may_be_a_list_without_the_eval_key(parse, write, data):
    args = parse("--eval-config", write({"datasets": [{"name": "quiz", "path": data}]}))
    assert [item.name for item in args.eval_datasets] == ["quiz"]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("- 1", ValueError, "expected a mapping"),
        ({"eval": 3}, ValueError, "eval must be a mapping"),
        ({"datasets": {}}, ValueError, "no datasets"),
        ({"defaults": {}}, ValueError, "no datasets; the file has defaults"),
        ({"dataset": [{"name": "a", "path": "p"}]}, ValueError, r"unknown key dataset \(did you mean datasets\?\)"),
        ({"eval": {"default": {}, "datasets": {"a": {"path": "p"}}}}, ValueError, "did you mean defaults"),
        ({"datasets": [{"path": "p"}]}, ValueError, "needs a name"),
        ({"datasets": "p"}, TypeError, "must be a list or a mapping"),
        (
            {"defaults": {"something": 1}, "datasets": {"a": {"path": "p"}}},
            ValueError,
            "unknown key something; valid keys",
        ),
        ({"datasets": {"a": {"path": "p", "tempratur": 1}}}, TypeError, "data set a: unknown key tempratur"),
        ({"datasets": {"a": {}}}, TypeError, "data set a has no path"),
        ({"datasets": [{"name": "a", "path": "p"}, {"name": "a", "path": "q"}]}, ValueError, "a stands twice"),
        ({"datasets": {"a": {"path": "p", "min_eval_samples": 0}}}, ValueError, "min_eval_samples must be above 0"),
        (
            {"datasets": {"a": {"path": "p", "metadata_overrides": 3}}},
            TypeError,
            "metadata_overrides must be a mapping",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(parse, write, content, error, message):
    with pytest.raises(error, match=message):
        parse("--eval-config", write(content))


def test_fb_o05_unknown_default_gets_a_suggestion_and_each_set_keeps_its_stop(parse, write, data):
    with pytest.raises(ValueError, match=r"defaults: unknown key temprature \(did you mean temperature\?\)"):
        parse("--eval-config", write({"defaults": {"temprature": 0}, "datasets": {"a": {"path": data}}}))
    sets = {"a": {"path": data, "stop": ["###"]}, "b": {"path": data}}
    first, second = parse("--eval-config", write({"datasets": sets}), "--rollout-stop", "END").eval_datasets
    assert (first.stop, second.stop) == (["###"], ["END"])


def test_record_needs_only_name_and_path():
    item = EvalDatasetConfig(name="aime", path="/data/aime.jsonl")
    assert item.temperature is None
    assert item.path == "/data/aime.jsonl"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_samples_per_eval_prompt": 0}, "set a: n_samples_per_eval_prompt 0: expected a whole number of at least 1"),
        ({"n_samples_per_eval_prompt": None}, "n_samples_per_eval_prompt None"),
        ({"n_samples_per_eval_prompt": "8"}, "n_samples_per_eval_prompt '8'"),
        ({"temperature": -0.1}, "set a: temperature -0.1: expected a number of at least 0"),
        ({"temperature": "hot"}, "set a: temperature 'hot'"),
        ({"top_p": 0}, "set a: top_p 0: expected a number above 0, at most 1"),
        ({"top_k": 0}, "set a: top_k 0: .*not 0"),
        ({"max_response_len": True}, "set a: max_response_len True"),
        ({"min_new_tokens": 9, "max_response_len": 8}, "set a: min_new_tokens 9 is above max_response_len 8"),
        ({"rm_type": "mathh"}, "set a: rm_type mathh: one of math"),
        ({"rm_type": "remote_rm"}, "set a: rm_type remote_rm needs --rm-url"),
        ({"custom_rm_path": "absent.py:score"}, "set a: custom_rm_path .*absent.py:score: no such file"),
        ({"multimodal_keys": {"picture": "x"}}, "set a: multimodal_keys .*expected an object from image, video, audio"),
        ({"eval_early_stop_remaining": 4}, "set a: eval_early_stop_remaining and eval_early_stop_idle_timeout need"),
    ],
)
def test_values_of_a_set_are_checked_at_the_start(parse, write, data, settings, message):
    with pytest.raises(ValueError, match=message):
        parse("--eval-config", write({"datasets": {"a": {"path": data, **settings}}}), "--eval-interval", "1")


def test_hook_files_of_a_set_are_absolute_and_its_own_settings_are_said(parse, write, data, tmp_path):
    (tmp_path / "score.py").write_text("async def custom_rm(args, sample): return 1.0\n")
    settings = {"custom_rm_path": "score.py", "rm_type": "no matter", "app_service": "http://x", "eval_task_timeout": 3}
    args = parse("--eval-config", write({"datasets": {"a": {"path": data, **settings}}}))
    assert args.eval_datasets[0].custom_rm_path == str(tmp_path / "score.py")
    assert "evaluation set a: only functions of your own read app_service, eval_task_timeout" in args.start_notes


def test_references_in_the_file_are_resolved(parse, write, data, monkeypatch):
    monkeypatch.setenv("EVAL_DATA", data)
    text = """
    size: 4
    eval:
      defaults: {n_samples_per_eval_prompt: "${size}", metadata_overrides: {tag: "n${size}", home: "${oc.env:ABSENT,here}"}}
      datasets: {a: {path: "${oc.env:EVAL_DATA}"}}
    """
    (item,) = parse("--eval-config", write(text)).eval_datasets
    assert (item.n_samples_per_eval_prompt, item.path) == (4, data)
    assert item.metadata_overrides == {"tag": "n4", "home": "here"}
    for wrong in ("${nowhere}", "${oc.env:ABSENT}", "${eval.datasets.a.path}"):
        with pytest.raises(ValueError, match="--eval-config .*is not defined|refers to itself"):
            parse("--eval-config", write({"eval": {"datasets": {"a": {"path": wrong}}}}))


def test_never_ending_rollouts_are_evaluated_by_the_built_in_function(parse, data):
    endless = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")
    evaluated = (*endless, "--eval-interval", "1", "--eval-prompt-data", "a", data)
    args = parse(*evaluated)
    assert args.eval_function_path == "slime.rollout.sglang_rollout.generate_rollout"
    assert any("--eval-function-path is" in note for note in args.start_notes)
    assert parse(*endless).eval_function_path == endless[1]
    with pytest.raises(ValueError, match="--eval-function-path .*fully_async.* does not evaluate"):
        parse(*evaluated, "--eval-function-path", endless[1])


def test_media_need_someone_who_looks_at_them(parse, write, data):
    keys = ("--multimodal-keys", '{"image": "images"}')
    with pytest.raises(ValueError, match="--multimodal-keys .*the embedded engine reads text only"):
        parse(*keys)
    sets = write({"datasets": {"a": {"path": data, "multimodal_keys": {"image": "images"}}}})
    with pytest.raises(ValueError, match="evaluation set a: multimodal_keys .*reads text only"):
        parse("--eval-config", sets, "--eval-interval", "1")
    with pytest.raises(ValueError, match="--multimodal-keys .*expected an object"):
        parse("--multimodal-keys", '{"picture": "images"}', "--custom-generate-function-path", "my.generate")
    args = parse(*keys, "--custom-generate-function-path", "my.generate")
    assert any("models read text only" in note for note in args.start_notes)
    assert parse(*keys, "--debug-train-only").multimodal_keys == {"image": "images"}


def test_a_message_names_the_file_that_the_set_is_in(parse, write):
    path = write({"datasets": {"a": {"path": "nowhere.jsonl"}}})
    with pytest.raises(ValueError, match=f"--eval-config {path}: evaluation set a: .*nowhere.jsonl: no such file"):
        parse("--eval-config", path)


def test_a_reward_type_of_a_set_that_a_function_grades_is_said_to_be_left_to_it(parse, write, data):
    path = write({"datasets": {"a": {"path": data, "rm_type": "math"}}})
    words = ("--eval-config", path, "--eval-interval", "1")
    note = "evaluation set a: rm_type math is left to hooks.reward"
    assert note in parse(*words, "--custom-rm-path", "hooks.reward").start_notes
    assert not any("is left to" in said for said in parse(*words).start_notes)
