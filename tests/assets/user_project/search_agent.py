"""A tool loop that keeps tokens, mask and log-probs itself, as projects on this framework do. --custom-generate-function-path"""

import re

from events import note

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIGS = {"max_turns": 2, "topk": 1}


async def search(query):
    return f"<information>{len(query)}</information>"


def postprocess_predictions(prediction):
    match = re.search(r"[aeiou]", prediction)
    return ("search", match.group(0)) if match else ("answer", prediction)


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "Partial rollout is not supported for this function at the moment."
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_tokens_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_token_ids, loss_mask, rollout_log_probs = "", [], [], []
    note(args, "generate", sample.index, args.my_search_budget)

    for turn in range(CONFIGS["max_turns"]):
        payload = {
            "input_ids": prompt_tokens_ids + response_token_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample

        cur_response = output["text"]
        cur_token_ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += cur_response
        response_token_ids += cur_token_ids
        loss_mask += [1] * len(cur_token_ids)
        rollout_log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]

        action, content = postprocess_predictions(cur_response)
        if action == "answer" or turn + 1 == CONFIGS["max_turns"]:
            break
        observation = await search(content)
        obs_token_ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        response_token_ids += obs_token_ids
        loss_mask += [0] * len(obs_token_ids)
        rollout_log_probs += [0.0] * len(obs_token_ids)

    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = rollout_log_probs
    sample.metadata["round_number"] = turn + 1
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    note(args, "rm", sample.index)
    place = sample.index % args.n_samples_per_prompt  # no group is without spread, whatever the model says
    return {"score": place / args.n_samples_per_prompt, "turns": sample.metadata["round_number"]}
