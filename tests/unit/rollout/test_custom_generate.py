import math
from collections import Counter

import agent_hooks
import pytest
import stub_rm
from fake_engine import reply, until
from tiny_tokenizer import CHATML, GLM, build

from slime.rollout import generate_single
from slime.rollout.base_types import leaves_of
from slime.rollout.conversation import Recorder
from slime.rollout.custom_generate import call_sample_generate
from slime.rollout.data_source import create_data_source
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.generate_state import GenerateState
from slime.rollout.round_end import prepare_for_buffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import run
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.processing_utils import encode_prompt, load_tokenizer, render_chat
from slime.utils.types import Sample

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def chat_args(engine, make_args, write_rows):
    path = write_rows([{"input": MESSAGES, "label": "1"}] * 3)

    def make(hook, **overrides):
        hook = hook and f"agent_hooks.{hook}"
        return make_args(
            engine, prompt_data=path, custom_generate_function_path=hook, rollout_batch_size=1, **overrides
        )

    return make


@pytest.fixture
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


def one_group(args, rollout_id=0):
    return generate_rollout(args, rollout_id, create_data_source(args)).samples[0]


def spelled(tokenizer, text, finish="stop", end=True):
    """Ids one character at a time ("ab" as two), as a model may sample them, and the reply that holds them."""
    ids = [tokenizer.convert_tokens_to_ids(c) for c in text]
    ids += [tokenizer.eos_token_id] if end else []
    return reply(ids, text + ("<|im_end|>" if end else ""), finish)


def test_upstream_form_gets_one_sample(engine, chat_args):
    assert [s.metadata["form"] for s in one_group(chat_args("upstream"))] == ["sample", "sample"]


def test_evaluation_is_passed_only_to_functions_that_take_it(engine, chat_args):
    assert one_group(chat_args("upstream_with_evaluation"))[0].metadata["evaluation"] is False


def test_message_lists_are_rendered_for_the_built_in_generator_without_the_flag(engine, chat_args, tokenizer):
    one_group(chat_args(None))
    assert engine.requests[0]["input_ids"] == encode_prompt(tokenizer, render_chat(tokenizer, MESSAGES))


def test_fan_out_keeps_group_and_execution(engine, chat_args):
    group = one_group(chat_args("fan_out"))
    assert [len(parts) for parts in group] == [2, 2]
    assert [[part.rollout_id for part in parts] for parts in group] == [[0, 0], [1, 1]]
    assert {part.group_index for parts in group for part in parts} == {0}
    assert all(part.reward == 1.0 for parts in group for part in parts)


@pytest.mark.parametrize("group_rm", [False, True])
@pytest.mark.parametrize("hook", ["nothing_of_the_first", "nothing_of_the_first_of_a_list"])
def test_an_execution_without_samples_costs_itself_alone(engine, chat_args, tokenizer, caplog, hook, group_rm):
    hooks = {"custom_rm_path": "stub_rm.batch" if group_rm else "stub_rm.one", "group_rm": group_rm}
    stub_rm.seen["batch"].clear()
    args = chat_args(hook, rollout_sample_hook_path=["stub_rm.tag_hook"], **hooks)
    output = generate_rollout(args, 0, create_data_source(args))
    lost, part = output.samples[0][0], output.samples[0][1][0]
    assert (lost.status, lost.reward, lost.remove_sample, lost.index) == (Sample.Status.FAILED, 0.0, True, 0)
    assert lost.tokens == encode_prompt(tokenizer, render_chat(tokenizer, MESSAGES)) and lost.response_length == 0
    assert lost.prompt == MESSAGES and lost.group_index == 0 and lost.rollout_id is None and "tag" not in lost.metadata
    assert part.reward == 1.0 and part.status == Sample.Status.COMPLETED
    assert stub_rm.seen["batch"] == ([[1]] if group_rm else [])
    assert output.metrics["rollout/generation_failed"] == 1 and output.metrics["rollout/reward_failed"] == 0
    said = f"generation of sample 0 failed: ValueError: --custom-generate-function-path agent_hooks.{hook} returned no samples"
    assert said in caplog.text
    assert check_reward_nonzero_std(args, output.samples[0]).keep, "a single verdict has no spread"
    assert prepare_for_buffer([lost, part], 0, restart=False)[0].status == Sample.Status.PENDING


def test_a_response_with_an_error_that_the_users_function_noted_is_scored_with_its_group(engine, chat_args):
    hooks = {"rollout_sample_hook_path": ["stub_rm.tag_hook"], "custom_rm_path": "stub_rm.batch", "group_rm": True}
    group = one_group(chat_args("notes_an_error", **hooks))
    assert all(sample.reward is not None and "tag" in sample.metadata for sample in group)


def test_the_sample_that_stands_for_an_execution_without_samples_is_none_that_was_returned(engine, chat_args):
    lost, kept = one_group(chat_args("nothing_and_the_first"))
    assert (lost.index, lost.status, kept.index, kept.response) == (1, Sample.Status.FAILED, 0, "abc")


def test_executions_without_samples_in_evaluation_have_no_reward(engine, chat_args):
    args = chat_args("nothing_of_the_first")
    config = dict(name="set", path=args.prompt_data, n_samples_per_eval_prompt=2, temperature=0.0, top_p=1.0, top_k=-1)
    config |= dict(max_response_len=8, input_key="input", tool_key="tools", metadata_key="metadata")
    args.eval_datasets = [EvalDatasetConfig(**config, custom_rm_path="stub_rm.one")]
    output = generate_rollout(args, 0, None, evaluation=True)
    assert [math.isnan(reward) for reward in output.data["set"]["rewards"]] == [True, False] * 3
    assert output.metrics == {"eval/generation_failed": 3}


def test_a_round_of_executions_without_samples_ends_the_run(engine, chat_args):
    args = chat_args("nothing_at_all")
    with pytest.raises(
        RuntimeError, match="(?s)the generation of all 2 samples failed.*nothing_at_all returned no samp"
    ):
        generate_rollout(args, 0, create_data_source(args))


def test_an_execution_that_the_end_of_the_round_leaves_without_samples_is_executed_again(engine, chat_args):
    args = chat_args("nothing_at_all")
    GenerateState(args).aborted = True
    sample = Sample(index=0, group_index=0, prompt=MESSAGES)
    result = run(call_sample_generate(args, args.custom_generate_function_path, sample, {}, evaluation=False))
    assert result is sample and sample.status == Sample.Status.ABORTED and "generate_error" not in sample.metadata


def test_text_only_responses_are_encoded_flagged_and_counted(engine, chat_args, tokenizer):
    args = chat_args("text_only")
    output = generate_rollout(args, 0, create_data_source(args))
    sample = output.samples[0][0]
    ids = tokenizer.encode("ab!", add_special_tokens=False)
    assert sample.tokens[-2:] == ids and sample.response_length == 2 and sample.loss_mask == [1, 1]
    assert sample.rollout_log_probs is None and sample.metadata["tokens_from_text"] == 2
    assert sample.status == Sample.Status.COMPLETED and output.metrics["rollout/text_only_samples"] == 2


def test_a_wrong_return_type_is_named(engine, chat_args):
    with pytest.raises(TypeError, match="returns_text returned a str; expected .* Sample or list"):
        one_group(chat_args("returns_text"))
    with pytest.raises(ValueError, match="loses_a_sample returned 1 results for 2 samples"):
        one_group(chat_args("loses_a_sample"))


def test_fb_t04_turns_are_trained_on_sampled_ids_and_tool_text_is_masked(engine, chat_args, tokenizer):
    engine.answer = lambda payload: spelled(tokenizer, "ab" if len(engine.requests) % 2 else "cd")
    agent_hooks.calls.clear()
    group = one_group(chat_args("two_turns", max_turns=2, rollout_max_response_len=200))
    assert agent_hooks.calls == [(2, False)]
    sample = group[0]
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    trained = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert trained == [*spelled_ids(tokenizer, "ab"), *spelled_ids(tokenizer, "cd")]
    text = tokenizer.decode(sample.tokens)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
        "<|im_start|>tool\nresult 0<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>"
    )
    assert engine.requests[1]["input_ids"] == sample.tokens[: -len(spelled_ids(tokenizer, "cd"))]
    assert sample.prompt == MESSAGES and type(sample.prompt[0]) is dict
    assert sample.response == "cd" and sample.reward == 0.25 and sample.weight_versions == ["1", "1"]
    assert "tokens_from_text" not in sample.metadata


def spelled_ids(tokenizer, text):
    return [triple[1] for triple in spelled(tokenizer, text)["meta_info"]["output_token_logprobs"]]


def test_fb_t04_holds_for_a_template_without_end_token(engine, chat_args, tmp_path):
    folder = build(tmp_path / "glm", template=GLM)
    tokenizer = load_tokenizer(folder)
    engine.answer = lambda payload: spelled(tokenizer, "ab", end=False)
    sample = one_group(chat_args("two_turns", max_turns=2, rollout_max_response_len=200, hf_checkpoint=folder))[0]
    assert tokenizer.decode(sample.tokens) == "<|user|>\nhi<|assistant|>\nab<|tool|>\nresult 0<|assistant|>\nab"
    assert sum(sample.loss_mask) == 4


def test_options_of_the_template_reach_every_turn(engine, chat_args, tmp_path):
    template = CHATML.replace("{{ m['role'] }}", "{{ m['role'] }}{{ mark }}")
    folder = build(tmp_path / "marked", template=template)
    tokenizer = load_tokenizer(folder)
    engine.answer = lambda payload: spelled(tokenizer, "ab")
    options = {"max_turns": 2, "rollout_max_response_len": 200, "hf_checkpoint": folder}
    sample = one_group(chat_args("two_turns", apply_chat_template_kwargs={"mark": "!"}, **options))[0]
    said = tokenizer.decode(sample.tokens)
    assert "<|im_start|>user!\nhi" in said and "<|im_start|>tool!\nresult 0" in said


def test_samples_of_users_may_come_without_options_of_the_template(engine, make_args):
    recorder = Recorder(make_args(engine), {}, False, [Sample(index=0, apply_chat_template_kwargs=None)])
    assert recorder.open_chain(MESSAGES, None)[0].prompt_ids


@pytest.mark.parametrize("hook", ["copied_conversations", "rebuilt_in_order"])
def test_calls_find_their_sample_through_copies_and_by_order(engine, chat_args, hook):
    engine.answer = lambda payload: reply([len(engine.requests)], f"t{len(engine.requests)}")
    for sample in one_group(chat_args(hook)):
        assert sample.response == f"t{sample.tokens[-1]}" and sample.rollout_log_probs == [-0.5]


def test_prompt_text_is_followed_too(engine, make_args):
    engine.answer = lambda payload: reply([len(engine.requests)], f"t{len(engine.requests)}")
    args = make_args(engine, custom_generate_function_path="agent_hooks.from_text", rollout_batch_size=1)
    for sample in one_group(args):
        assert sample.response == f"t{sample.tokens[-1]}" and type(sample.prompt) is str and sample.prompt == "p0"


def test_a_request_that_forgets_the_adapter_is_an_error_and_not_an_answer_of_the_base_model(engine, chat_args):
    with pytest.raises(Exception, match="has no lora_path, so the base model answered"):
        one_group(chat_args("posts_itself", lora_sync="adapter"))


class Uncopied(str):
    def __deepcopy__(self, memo):
        raise AssertionError("contexts are long, and copying them whole costs more than a call")


def test_of_the_calls_that_a_hook_posts_only_what_is_read_later_is_kept(make_args):
    recorder = Recorder(make_args(), {}, False, [Sample(index=0)])
    body = {"input_ids": [1, 2], "image_data": [Uncopied("x")], "sampling_params": {"stop": [Uncopied("y")]}}
    recorder.observe("http://engine/generate", body, reply([3]))
    body["input_ids"].append(3)  # hooks grow their bodies in place
    assert [payload for payload, _ in recorder.posted] == [{"input_ids": [1, 2], "image_data": ["x"]}]


def test_edited_answers_become_masked_context_and_are_flagged(engine, chat_args, tokenizer):
    engine.answer = lambda payload: spelled(tokenizer, "ab")
    sample = one_group(chat_args("edits_the_answer", rollout_max_response_len=200))[0]
    assert sum(sample.loss_mask) == 3 and sample.loss_mask[-3:] == [1, 1, 1]
    assert "abZZ" in tokenizer.decode(sample.tokens)
    assert sample.metadata["tokens_from_text"] == sample.loss_mask.count(0)


def test_turns_share_the_response_budget(engine, chat_args, tokenizer):
    engine.answer = lambda payload: spelled(tokenizer, "cdef", "length", end=False)
    group = one_group(chat_args("two_turns", max_turns=3, rollout_max_response_len=6))
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [6, 6]
    assert group[0].status == Sample.Status.TRUNCATED and group[0].response_length == 4


def test_turns_have_different_seeds(engine, chat_args, tokenizer):
    engine.answer = lambda payload: spelled(tokenizer, "a")
    one_group(chat_args("two_turns", max_turns=2, rollout_max_response_len=200))
    assert len({request["sampling_params"]["sampling_seed"] for request in engine.requests}) == 4


def test_turns_go_to_the_engine_and_the_adapter_of_their_sample(engine, chat_args, tokenizer, write_rows):
    engine.answer = lambda payload: spelled(tokenizer, "ab")
    rows = [{"input": MESSAGES, "label": "1", "metadata": {"lora": name}} for name in ("first", "second")]
    args = chat_args("two_turns", max_turns=2, rollout_max_response_len=200, router_policy="consistent_hashing")
    args.prompt_data, args.rollout_batch_size = write_rows(rows, "adapters.jsonl"), 2
    args.lora_sync, args.lora_adapters = "adapter", ["first", "second"]
    groups = generate_rollout(args, 0, create_data_source(args)).samples
    asked = Counter(
        (headers["X-SMG-Routing-Key"], request["lora_path"])
        for headers, request in zip(engine.headers, engine.requests, strict=True)
    )
    assert asked == {(s.session_id, s.metadata["lora"]): 2 for group in groups for s in group}


def test_list_hook_sees_messages_even_with_a_chat_template(engine, chat_args, tokenizer):
    engine.answer = lambda payload: spelled(tokenizer, "a")
    sample = one_group(chat_args("two_turns", max_turns=1, apply_chat_template=True))[0]
    assert sample.prompt == MESSAGES


def test_generate_single_outside_of_a_hook_says_where_it_belongs():
    with pytest.raises(RuntimeError, match="only inside a --custom-generate-function-path function"):
        run(generate_single(MESSAGES))


def test_calls_that_a_hook_posts_itself_give_the_tokens_of_its_text(engine, chat_args, tokenizer):
    engine.answer = lambda payload: spelled(tokenizer, "ab", end=False)
    sample = one_group(chat_args("posts_itself"))[0]
    assert tokenizer.decode(sample.tokens) == "ask ab tool ab" and sample.response == "ab"
    assert sample.loss_mask == [1, 1, 0, 0, 0, 0, 0, 0, 1, 1] and "tokens_from_text" not in sample.metadata


def test_the_chosen_candidate_is_the_one_that_is_trained(engine, chat_args):
    engine.answer = lambda payload: reply([100 + payload["input_ids"][1]], f"answer {payload['input_ids'][1]}")
    sample = one_group(chat_args("posts_candidates"))[0]
    assert sample.tokens == [9, 1, 101] and sample.rollout_log_probs == [-0.5]


def test_turns_ask_for_the_experts_of_all_tokens_read_so_far(engine, chat_args, tokenizer):
    def answer(payload):
        given = spelled(tokenizer, "ok")
        tokens = len(payload["input_ids"]) + len(given["meta_info"]["output_token_logprobs"])
        given["meta_info"]["routed_experts"] = list(range((tokens - 1) * 4))  # two layers, two experts a token
        return given

    engine.answer = answer
    sample = one_group(chat_args("two_turns", max_turns=2, use_rollout_routing_replay=True))[0]
    assert all(request["return_routed_experts"] is True for request in engine.requests)
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 2, 2)


def test_a_hook_cannot_move_a_sample_or_change_the_parameters_of_others(engine, chat_args):
    args = chat_args("takes_liberties", rollout_stop=["end"])
    group = one_group(args)
    assert [(sample.group_index, sample.index) for sample in group] == [(0, 0), (0, 1)]
    assert [request["sampling_params"]["stop"] for request in engine.requests] == [["end", "everywhere"]] * 2
    assert args.rollout_stop == ["end"]


def test_results_in_another_order_keep_their_own_calls(engine, chat_args):
    engine.answer = lambda payload: reply([len(engine.requests)], f"t{len(engine.requests)}")
    for sample in one_group(chat_args("other_order")):
        assert sample.response == f"t{sample.tokens[-1]}" and sample.tokens[-1] == sample.index + 1


def test_plain_functions_generate_side_by_side(engine, chat_args):
    assert [sample.response for sample in one_group(chat_args("plain"))] == ["abc", "abc"]


def test_a_reward_of_the_generate_function_that_is_no_number_counts_as_failed(engine, make_args):
    args = make_args(engine, custom_generate_function_path="agent_hooks.scores_itself")
    output = generate_rollout(args, 0, create_data_source(args))
    rewards = [(sample.reward, sample.status, sample.remove_sample) for group in output.samples for sample in group]
    assert rewards == [(0.0, Sample.Status.FAILED, True), (0.25, Sample.Status.COMPLETED, False)] * 2
    assert output.metrics["rollout/reward_failed"] == 2


@pytest.mark.parametrize("hook", ["makes_a_new_sample", "makes_new_samples"])
def test_a_sample_made_anew_belongs_to_the_prompt_and_is_scored_like_it(engine, make_args, write_rows, hook):
    rows = [{"input": "p", "label": "abc", "metadata": {"rm_type": "f1"}}, {"input": "q", "label": "x abc y"}]
    hooks = {"custom_generate_function_path": f"agent_hooks.{hook}", "custom_rm_path": None}
    args = make_args(engine, prompt_data=write_rows(rows), rm_type="f1", **hooks)
    groups = generate_rollout(args, 0, create_data_source(args)).samples
    assert [[(s.group_index, s.index, s.reward) for s in group] for group in groups] == [
        [(0, 0, 1.0), (0, 1, 1.0)],
        [(1, 2, 0.5), (1, 3, 0.5)],
    ]
    assert groups[0][0].status is Sample.Status.COMPLETED and groups[0][0].metadata == {"a": 1, "rm_type": "f1"}


def test_arrays_of_a_hook_become_lists(engine, chat_args):
    engine.answer = lambda payload: reply([7, 8, 9], "abc")
    for sample in one_group(chat_args("arrays")):
        assert type(sample.tokens) is list and sample.tokens[-3:] == [7, 8, 9]
        assert sample.loss_mask == [1, 1, 1] and sample.rollout_log_probs == [-0.5] * 3


async def _two_turns(conversation):
    for _ in range(2):
        try:
            text = await generate_single(conversation)
        except Exception:  # agents that go on whatever happens
            text = "failed"
        conversation = [*conversation, {"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return text


async def by_sample(args, sample, sampling_params):
    sample.response = await _two_turns(sample.prompt)
    return sample


def in_a_thread(args, sample, sampling_params):
    sample.response = run(_two_turns(sample.prompt))
    return sample


async def by_group(args, samples, evaluation=False):
    for sample in samples:
        sample.response = await _two_turns(sample.prompt)
    return samples


@pytest.mark.parametrize("partial_rollout", [False, True])
@pytest.mark.parametrize("hook", ["by_sample", "in_a_thread", "by_group"])
def test_a_turn_that_the_end_of_the_round_has_cut_is_no_turn(
    engine, make_args, write_rows, tokenizer, hook, partial_rollout
):
    """Prompt b is in its first turn when prompt a has passed, it would have gone on from half an answer; then a waits for b."""
    cut = [tokenizer.convert_tokens_to_ids(c) for c in "67"]

    late = Counter()  # requests of either round that hang

    async def answer(payload):
        round_number = engine.aborts
        if ("b" in tokenizer.decode(payload["input_ids"])) == (round_number == 0):
            late[round_number] += 1
            return {"hang": cut}
        await until(lambda: late[round_number] == (1 if hook == "by_group" else 2), "the late ones")
        return spelled(tokenizer, "ok")

    engine.answer = answer
    rows = [{"input": [{"role": "user", "content": name}]} for name in ("a", "b")]
    args = make_args(
        engine, prompt_data=write_rows(rows, "late.jsonl"), custom_generate_function_path=f"{__name__}.{hook}",
        rollout_batch_size=1, over_sampling_batch_size=2, partial_rollout=partial_rollout, rollout_max_response_len=200,
    )  # fmt: skip
    source = create_data_source(args)
    groups = [generate_rollout(args, rollout_id, source).samples[0] for rollout_id in range(2)]
    assert [group[0].prompt[0]["content"] for group in groups] == ["a", "b"]
    for sample in leaves_of(groups):
        assert sample.status == Sample.Status.COMPLETED and sample.response == "ok"
        said = [
            token
            for token, trained in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True)
            if trained
        ]
        assert tokenizer.decode(said) == "ok<|im_end|>ok<|im_end|>"
