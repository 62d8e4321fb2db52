r"""Which reward answers for a sample: types, prefixes, user functions in every form, errors."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from slime.rollout.rm_hub import async_rm, batched_async_rm, math_verify_pool
from slime.utils.types import Sample

HOOKS = """
import asyncio
calls = []
cancelled = []

async def single(args, sample, **kwargs):
    return len(sample.response)

def plain(args, sample):
    return 2.0

async def batch(args, samples, **kwargs):
    calls.append(len(samples))
    return [i for i, _ in enumerate(samples)]

async def short(args, samples):
    return [1.0]

async def one_fails(args, sample):
    if sample.index == 1:
        raise KeyError("judge")
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        cancelled.append(sample.index)
        raise

class CustomRewardModel:
    built = 0
    def __init__(self, model_path):
        type(self).built += 1
        self.model_path = model_path
    def compute_reward(self, prompts, responses):
        return [float(len(p) + len(r)) for p, r in zip(prompts, responses)]
"""


def make_args(**changes):
    values = dict(
        custom_rm_path=None, rm_type=None, rm_url=None, rm_model_path=None, hf_checkpoint="/m", rm_timeout=120.0
    )
    return SimpleNamespace(**{**values, **changes})


def make_sample(response="", label=None, index=0, **metadata):
    return Sample(index=index, prompt="pp", response=response, label=label, metadata=metadata)


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "rm_hub_test_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    module = importlib.import_module("rm_hub_test_hooks")
    module.calls.clear()
    module.cancelled.clear()
    return module


async def test_fb_r01_number_zero_is_a_label_and_a_missing_label_an_error():
    args = make_args(rm_type="math")
    assert await async_rm(args, make_sample(r"\boxed{0}", 0)) == 1
    for label in (None, ""):
        with pytest.raises(ValueError, match="sample 7 has no label.*--label-key"):
            await async_rm(args, make_sample(r"\boxed{0}", label, index=7))


@pytest.mark.parametrize("name, expected", [("math", 1), ("deepscaler", 1), ("f1", 1.0)])
async def test_fb_r02_boxed_prefix_grades_the_bare_answer(name, expected):
    assert await async_rm(make_args(rm_type=f"boxed_{name}"), make_sample(r"Answer: \boxed{5}", "5")) == expected
    assert await async_rm(make_args(rm_type=f"boxed_{name}"), make_sample("Answer: 5", "5")) == 0


async def test_boxed_dapo_scores_the_bare_answer():
    reward = await async_rm(make_args(rm_type="boxed_dapo"), make_sample(r"\boxed{5}", "5"))
    assert reward == {"score": 1.0, "acc": True, "pred": "5"}


async def test_metadata_type_wins_over_the_flag():
    assert await async_rm(make_args(rm_type="math"), make_sample("the cat", "cat", rm_type="f1")) == 1.0
    assert await async_rm(make_args(rm_type="random"), make_sample()) in (0, 1)


@pytest.mark.parametrize("rm_type, text", [("nope", "unknown"), (None, "neither --rm-type")])
async def test_unusable_types_are_refused_with_the_choices(rm_type, text):
    with pytest.raises(ValueError, match=f"{text}.*choose one of dapo"):
        await async_rm(make_args(rm_type=rm_type), make_sample("x", "x"))


async def test_ifbench_needs_nothing_but_the_row():
    instructions = {"instruction_id_list": ["count:word_count_range"], "kwargs": {"min_words": 2, "max_words": 2}}
    args = make_args(rm_type="ifbench")
    assert await async_rm(args, make_sample("two words", **instructions)) == 1.0
    assert await async_rm(args, make_sample("these three words", **instructions)) == 0.0
    assert await async_rm(args, make_sample("no instructions")) == 0.0
    boxed = make_args(rm_type="boxed_ifbench")
    assert await async_rm(boxed, make_sample(r"many words here \boxed{two words}", **instructions)) == 1.0


async def test_user_functions_of_every_form(hooks):
    samples = [make_sample("a"), make_sample("bbb")]
    expected = {"single": [1, 3], "plain": [2.0, 2.0], "batch": [0, 1], "CustomRewardModel": [3.0, 5.0]}
    for name, rewards in expected.items():
        args = make_args(custom_rm_path=f"rm_hub_test_hooks.{name}")
        assert await batched_async_rm(args, samples) == rewards
        assert await async_rm(args, samples[0]) == rewards[0]
    assert hooks.CustomRewardModel.built == 1 and hooks.calls == [2, 1]


async def test_hooks_never_see_an_empty_list(hooks):
    assert await batched_async_rm(make_args(custom_rm_path="rm_hub_test_hooks.batch"), []) == []
    assert hooks.calls == []


async def test_per_sample_path_wins_also_in_a_batch(hooks):
    samples = [make_sample("a"), make_sample(r"\boxed{1}", "1"), make_sample("ccc")]
    samples[0].custom_rm_path = samples[2].custom_rm_path = "rm_hub_test_hooks.batch"
    assert await batched_async_rm(make_args(rm_type="math"), samples) == [0, 1, 1]
    assert hooks.calls == [2]


async def test_batch_of_wrong_length_names_the_path(hooks):
    with pytest.raises(ValueError, match="rm_hub_test_hooks.short.*2 samples"):
        await batched_async_rm(make_args(custom_rm_path="rm_hub_test_hooks.short"), [make_sample(), make_sample()])


async def test_fb_r15_a_failing_reward_cancels_its_siblings(hooks):
    samples = [make_sample(index=i) for i in range(3)]
    with pytest.raises(KeyError, match="judge"):
        await asyncio.wait_for(batched_async_rm(make_args(custom_rm_path="rm_hub_test_hooks.one_fails"), samples), 25)
    assert sorted(hooks.cancelled) == [0, 2]


@pytest.fixture
async def service():
    """A reward service: `answers` are given in turn, the last one again and again; `seen` are the bodies that came."""
    from aiohttp import web

    from slime.utils.http_utils import close_session

    state = SimpleNamespace(answers=[], seen=[])

    async def handler(request):
        state.seen.append((request.path, await request.json()))
        status, answer = state.answers.pop(0) if len(state.answers) > 1 else state.answers[0]
        if status == "hang":
            await asyncio.sleep(60)
        return web.json_response(answer, status=status) if status != "text" else web.Response(text=answer)

    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/rm"
    yield state
    await close_session()
    await runner.cleanup()


async def test_remote_rm_posts_and_returns_the_body(service):
    service.answers = [(200, {"score": 0.0})]
    args = make_args(rm_type="remote_rm", rm_url=service.url)
    assert await async_rm(args, make_sample("r", "l")) == {"score": 0.0}
    assert service.seen == [("/rm", {"prompt": "pp", "response": "r", "label": "l"})]
    with pytest.raises(ValueError, match="--rm-url"):
        await async_rm(make_args(rm_type="remote_rm"), make_sample())


async def test_remote_rm_asks_again_when_the_service_is_busy_and_not_when_it_refuses(service):
    args = make_args(rm_type="remote_rm", rm_url=service.url)
    service.answers = [(503, None), (429, None), (200, 0.5)]
    assert await async_rm(args, make_sample()) == 0.5 and len(service.seen) == 3
    service.answers = [(400, {"error": "no such label"})]
    with pytest.raises(RuntimeError, match="answered 400: .*no such label"):
        await async_rm(args, make_sample())
    assert len(service.seen) == 4


async def test_remote_rm_that_hangs_or_is_away_ends_before_the_timeout_with_what_it_did(service):
    service.answers = [("hang", None)]
    with pytest.raises(RuntimeError, match=f"POST {service.url} failed.*no answer within 0.27 s"):
        await async_rm(make_args(rm_type="remote_rm", rm_url=service.url, rm_timeout=0.3), make_sample())
    away = "http://127.0.0.1:9/rm"
    with pytest.raises(RuntimeError, match=f"POST {away} failed.*Connect"):
        await async_rm(make_args(rm_type="remote_rm", rm_url=away, rm_timeout=1.0), make_sample())


async def test_reward_model_on_an_engine_is_asked_for_prompt_and_response(service):
    service.answers = [(200, {"embedding": [0.25], "meta_info": {}})]
    args = make_args(rm_type="reward_model", rm_url=service.url)
    assert await async_rm(args, make_sample("answer")) == 0.25
    args = make_args(rm_type="reward_model", rm_url=service.url + "/classify/")
    assert await async_rm(args, make_sample("answer")) == 0.25
    assert service.seen == [("/rm/classify", {"text": "ppanswer"})] * 2


@pytest.mark.parametrize(
    "answer", [{"embedding": [0.1, 0.2]}, {"embedding": []}, {"text": "hm"}, [1.0], 0.5, None, "html"]
)
async def test_engine_that_gives_no_score_is_an_error_that_names_it(service, answer):
    service.answers = [(200, answer)]
    with pytest.raises(ValueError, match=f"--rm-url {service.url}/classify: expected one score"):
        await async_rm(make_args(rm_type="reward_model", rm_url=service.url), make_sample("answer"))


async def test_reward_model_must_be_named():
    with pytest.raises(ValueError, match="--rm-type reward_model needs --rm-model-path, or --rm-url"):
        await async_rm(make_args(rm_type="reward_model"), make_sample("answer"))


async def test_math_verify_runs_in_a_worker_and_survives_a_hanging_comparison(monkeypatch):
    pool = math_verify_pool.VerifyPool(1)
    monkeypatch.setattr(math_verify_pool, "_pools", [pool])
    try:
        args = make_args(rm_type="math_verify")
        assert await async_rm(args, make_sample(r"\boxed{\frac{2}{4}}", "0.5")) == 1.0
        assert await async_rm(args, make_sample(r"\boxed{5}", "0.5")) == 0.0
        boxed = make_args(rm_type="boxed_math_verify")
        assert await async_rm(boxed, make_sample(r"so \boxed{\frac{3}{6}}", "1/2")) == 1.0
        hanging = make_sample("$9^{9^{9^9}}$", "$9^{9^{9^8}}$")
        assert await async_rm(make_args(rm_type="math_verify", rm_timeout=0.3), hanging) == 0.0
        assert await async_rm(args, make_sample(r"\boxed{7}", "7.0")) == 1.0
    finally:
        pool.close()
