"""A round of the rollout loop against the engine: one request for a prompt's samples gives the samples of single requests."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

from slime.config import parse_args
from slime.rollout.data_source import create_data_source
from slime.rollout.sglang_rollout import generate_rollout


async def length_reward(args, sample, **kwargs) -> float:
    return float(sample.response_length)


def round_of(mode: str, url: str, model_dir, tmp_path) -> list:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input": f"copy {i:04d}=", "label": str(i)}) + "\n" for i in range(16)))
    flags = "--rollout-batch-size 6 --n-samples-per-prompt 4 --rollout-max-response-len 24 --num-rollout 1 --rollout-num-gpus 1"
    args = parse_args(
        [
            *(
                "--hf-checkpoint",
                str(model_dir),
                "--prompt-data",
                str(data),
                *flags.split(),
                "--output-dir",
                str(tmp_path),
            ),
            *("--custom-rm-path", f"{__name__}.length_reward", "--group-requests", mode, "--run-name", mode),
        ]
    )
    args.sglang_router_ip, args.sglang_router_port = urlsplit(url).hostname, urlsplit(url).port
    args.sglang_model_routers = None
    return generate_rollout(args, 5, create_data_source(args)).samples


@pytest.mark.embedded_only
def test_samples_do_not_depend_on_how_they_are_asked_for(api, engine_url, model_dir, tmp_path):
    together, alone = (round_of(mode, engine_url, model_dir, tmp_path) for mode in ("auto", "never"))
    assert [[s.index for s in group] for group in together] == [[s.index for s in group] for group in alone]
    for ours, theirs in zip(sum(together, []), sum(alone, []), strict=True):
        assert (ours.tokens, ours.response, ours.status) == (theirs.tokens, theirs.response, theirs.status)
        assert ours.rollout_log_probs == pytest.approx(theirs.rollout_log_probs, abs=1e-5)
        assert ours.reward == theirs.reward == ours.response_length
    assert len({tuple(s.tokens) for s in sum(together, [])}) == 24
