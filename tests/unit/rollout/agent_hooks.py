"""Custom generate functions in each documented form."""

from __future__ import annotations

import asyncio
import threading

from slime.rollout import generate_single
from slime.rollout.sglang_rollout import GenerateState, generate, get_model_url
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

calls: list = []


async def upstream(args, sample, sampling_params):
    sample.metadata["form"] = "sample"
    return await generate(args, sample, sampling_params)


async def upstream_with_evaluation(args, sample, sampling_params, evaluation=False):
    sample.metadata["evaluation"] = evaluation
    return await generate(args, sample, sampling_params)


async def fan_out(args, sample, sampling_params):
    parts = []
    for text in ("x", "y"):
        part = Sample(prompt=sample.prompt, rollout_id=sample.index)
        parts.append(await generate(args, part, sampling_params))
        part.response = text
    return parts


async def nothing_of_the_first(args, sample, sampling_params):
    """An agent whose episodes of even numbers come to nothing, whatever it did to the sample."""
    if sample.index % 2 == 0:
        sample.prompt, sample.response, sample.response_length, sample.group_index = "other", "x", 3, 77
        return []
    return [await generate(args, sample, sampling_params)]


async def nothing_of_the_first_of_a_list(args, samples, evaluation=False):
    """The same in the list form; the result of the other sample is a list of the parts that its conversation has."""
    for sample in samples:
        sample.response = await generate_single([{"role": "user", "content": "go"}])
    return [[] if sample.index % 2 == 0 else [sample] for sample in samples]


async def nothing_and_the_first(args, samples, evaluation=False):
    samples[0].response = await generate_single(samples[0].prompt)
    return [[], samples[0]]


async def nothing_at_all(args, sample, sampling_params):
    return []


async def text_only(args, sample, sampling_params):
    sample.response = "ab!"
    return sample


async def returns_text(args, sample, sampling_params):
    return "oops"


async def two_turns(args, samples, evaluation=False):
    """The loop that the documents show."""
    calls.append((len(samples), evaluation))
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            text = await generate_single(conversation)
            conversation.append({"role": "assistant", "content": text})
            if turn + 1 < args.max_turns:
                conversation.append({"role": "tool", "content": f"result {turn}"})
        sample.response = conversation[-1]["content"]
        sample.reward = 0.25
    return samples


async def copied_conversations(args, samples, evaluation=False):
    async def one(sample):
        conversation = [*sample.prompt]
        conversation.append({"role": "assistant", "content": await generate_single(conversation)})
        sample.response = conversation[-1]["content"]

    await asyncio.gather(*(one(sample) for sample in reversed(samples)))
    return samples


async def from_text(args, samples, evaluation=False):
    for sample in samples:
        sample.response = await generate_single([{"role": "user", "content": sample.prompt}])
    return samples


async def rebuilt_in_order(args, samples, evaluation=False):
    for sample in samples:
        sample.response = await generate_single([{"role": "user", "content": "fresh text"}])
    return samples


async def edits_the_answer(args, samples, evaluation=False):
    for sample in samples:
        first = await generate_single(sample.prompt)
        sample.prompt += [{"role": "assistant", "content": first + "ZZ"}, {"role": "user", "content": "go"}]
        sample.response = await generate_single(sample.prompt)
    return samples


async def loses_a_sample(args, samples, evaluation=False):
    return samples[1:]


async def cannot_find_the_state(args, sample, sampling_params):
    assert GenerateState(args).tokenizer is not None
    return await generate(args, sample, sampling_params)


async def posts_itself(args, sample, sampling_params):
    url = get_model_url(args)
    body = {"text": "ask ", "sampling_params": sampling_params, "return_logprob": True}
    first = await post(url, body)
    body["text"] += first["text"] + " tool "
    sample.response = (await post(url, body))["text"]
    return sample


async def posts_candidates(args, sample, sampling_params):
    bodies = [{"input_ids": [9, i], "sampling_params": sampling_params, "return_logprob": True} for i in range(3)]
    outputs = [await post(get_model_url(args), body) for body in bodies]
    sample.response = outputs[1]["text"]
    return sample


async def takes_liberties(args, sample, sampling_params):
    """Everything that a hook should not do to what it is given."""
    sample.group_index, sample.index, sample.prompt = 77, 99, sample.prompt
    sampling_params["stop"].append("everywhere")
    sampling_params["max_new_tokens"] = 3
    return await generate(args, sample, sampling_params)


async def other_order(args, samples, evaluation=False):
    for sample in samples:
        sample.response = await generate_single(sample.prompt)
    return samples[::-1]


_together = threading.Barrier(2)


def plain(args, sample, sampling_params):
    """Not async, and it blocks until the other sample of the group is here as well."""
    _together.wait(10)
    return run(generate(args, sample, sampling_params))


async def scores_itself(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.reward = [float("nan"), 0.25][sample.index % 2]
    return sample


async def asks_itself_in_parallel(args, sample, sampling_params):
    """Three solvers of one question and a judge of their answers, as multi-agent code does."""
    sample.metadata["params"] = dict(sampling_params)
    url = get_model_url(args)

    async def ask(ids):
        return await post(url, {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True})

    await asyncio.gather(*(ask([1, sample.index]) for _ in range(3)))
    sample.response = (await ask([2, sample.index]))["text"]
    return sample


async def chooses_its_own_seed(args, sample, sampling_params):
    params = {**sampling_params, "sampling_seed": 5}
    for _ in range(2):
        await post(get_model_url(args), {"input_ids": [1], "sampling_params": params, "return_logprob": True})
    sample.response = "x"
    return sample


async def converses_in_parallel(args, samples, evaluation=False):
    for sample in samples:
        answers = await asyncio.gather(*(generate_single(sample.prompt) for _ in range(3)))
        sample.response = answers[0]
    return samples


async def makes_a_new_sample(args, sample, sampling_params):
    """An environment's own record of the episode, as a sample that knows the task's number and nothing of the prompt's."""
    answer = await generate(args, Sample(prompt=sample.prompt), sampling_params)
    return Sample(
        index=7, tokens=answer.tokens, response_length=3, response="abc", status="completed", metadata={"a": 1}
    )


async def makes_new_samples(args, samples, evaluation=False):
    sampling_params = GenerateState(args).sampling_params
    return [await makes_a_new_sample(args, sample, sampling_params) for sample in samples]


async def arrays(args, sample, sampling_params):
    """Per-token fields as arrays and tensors, as numerical code makes them."""
    import numpy
    import torch

    from slime.rollout.sglang_rollout import generate

    sample = await generate(args, sample, sampling_params)
    sample.tokens = torch.tensor(sample.tokens)
    sample.loss_mask = numpy.array(sample.loss_mask, dtype=bool)
    sample.rollout_log_probs = torch.tensor([sample.rollout_log_probs])
    return sample


async def notes_an_error(args, sample, sampling_params):
    """A tool that broke is noted under a name that the built-in generator uses too."""
    sample = await generate(args, sample, sampling_params)
    sample.metadata["generate_error"] = "the tool crashed"
    return sample
