"""Turns with a tool, token by token.  --custom-generate-function-path examples/hooks/multi_turn_tool.py --max-turns 2

The model writes, a tool answers, the model goes on. Tokens of the model are trained with the log-probs that the engine
reported; tokens of the tool are `trainable=False`: in the context, out of the loss.
"""

from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post


def run_tool(text):
    return f"\n[{len(text)} characters]\n"


async def generate(args, sample, sampling_params):
    tokenizer = GenerateState(args).tokenizer
    if not sample.tokens:
        sample.tokens = tokenizer.encode(sample.prompt, add_special_tokens=False)
    for turn in range(args.max_turns):
        params = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length}
        if params["max_new_tokens"] <= 0:
            sample.status = sample.Status.TRUNCATED
            break
        request = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        output = await post(get_model_url(args), request)
        sampled = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, _ in sampled],
            log_probs=[log_prob for log_prob, _, _ in sampled],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if sample.status == sample.Status.ABORTED or turn + 1 == args.max_turns:
            break
        answer = run_tool(output["text"])
        sample.append_response_tokens(
            args, tokens=tokenizer.encode(answer, add_special_tokens=False), trainable=False, text=answer
        )
    return sample
