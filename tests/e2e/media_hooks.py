"""A user's code for rows with images: a generate function that looks at them and asks a text engine."""

from __future__ import annotations


async def describe_and_ask(args, sample, sampling_params):
    """The image's colour becomes the prompt; what a processor would make of the pixels goes to the trainer."""
    import torch

    from slime.rollout.sglang_rollout import GenerateState, get_model_url
    from slime.utils.http_utils import post

    image = sample.multimodal_inputs["images"][0]
    if not sample.tokens:
        red, green, blue = image.getpixel((0, 0))
        sample.tokens = GenerateState(args).tokenizer.encode(f"colour {red} {green} {blue}=")
        pixels = torch.tensor(list(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, 3)
        sample.multimodal_train_inputs = {"pixel_values": pixels, "size": image.size}
    budget = sampling_params["max_new_tokens"] - sample.response_length
    payload = {"input_ids": sample.tokens, "sampling_params": {**sampling_params, "max_new_tokens": budget}}
    output = await post(get_model_url(args), {**payload, "return_logprob": True})
    triples = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, *_ in triples],
        log_probs=[log_prob for log_prob, *_ in triples],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


async def colour_is_kept(args, sample, **kwargs):
    """The row's image is still the one of its label; otherwise the round's rewards fail."""
    image = sample.multimodal_inputs["images"][0]
    assert image.getpixel((0, 0)) == (int(sample.label), 20, 30) and image.size == (5, 4), image.getpixel((0, 0))
    return float(sample.tokens[-1] % 2)


async def scored_as_sampled(args, sample, **kwargs):
    """Largest difference between the log-probs of the rollout and those that the same engine gives when asked as a teacher."""
    from slime.rollout.on_policy_distillation import score_with_teacher
    from slime.rollout.sglang_rollout import get_model_url

    args.rm_url = get_model_url(args)
    await score_with_teacher(args, sample)
    return max(abs(a - b) for a, b in zip(sample.teacher_log_probs, sample.rollout_log_probs, strict=True))
