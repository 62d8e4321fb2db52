r"""Answers made to break graders: every built-in reward ends soon, gives a number and runs nothing."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from slime.rollout.rm_hub import async_rm
from slime.utils.types import Sample

IFBENCH = {"instruction_id_list": ["punctuation:no_comma", "count:pronouns"], "kwargs": [{}, {"N": 1}]}
CODE = "__import__('os').system('touch pwned')"
ANSWERS = {
    "code": CODE,
    "f-string": "{" + CODE + "}",
    "exec": f"exec({CODE!r})",
    "tower": "9**9**9",
    "high tower": "9^9^9^9^9^9",
    "latex tower": "9^{9^{9^{9}}}",
    "factorials": "9!" * 1000,
    "big product": "*".join(["9^999"] * 40),
    "root": "sqrt(" * 400 + "2" + ")" * 400,
    "brackets": "(" * 10_000 + "1" + ")" * 10_000,
    "braces": "{" * 10_000 + "}" * 10_000,
    "fractions": r"\frac{" * 2000 + "1" + "}{2}" * 2000,
    "boxes": r"\boxed{" * 2000 + "5" + "}" * 2000,
    "digits": "1" * 10_000,
    "signs": "-" * 20_000 + "1",
    "commas": "1,234" * 20_000,
    "long text": "the answer is A because " * 8_000,
    "long spaces": " " * 200_000 + "5",
    "long digits": "7" * 200_000,
    "megabyte of boxes": r"\boxed{" * 140_000,
    "long answers": "Answer: 5\n" * 20_000,
    "long dollars": "$" * 200_000,
    "nothing": "",
    "null": "\0" * 1000,
    "lone surrogate": "\ud800",
    "marks": "\u0301" * 100_000,
}
TYPES = [
    "math",
    "deepscaler",
    "dapo",
    "f1",
    "gpqa",
    "ifbench",
    "boxed_math",
    "boxed_dapo",
    "boxed_f1",
    "boxed_gpqa",
    "boxed_ifbench",
]
FORMS = ["{}", r"so \boxed{{{}}}", r"</think>\boxed{{{}}}", "Answer: {}"]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
async def test_hostile_answers_give_a_number_soon_and_run_nothing(answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(custom_rm_path=None, rm_type=None, rm_timeout=120.0)
    for rm_type in TYPES:
        args.rm_type = rm_type
        for form in FORMS[:2] if len(answer) > 50_000 else FORMS:
            sample = Sample(index=0, response=form.format(answer), label="x+1/2", metadata=dict(IFBENCH))
            started = time.process_time()
            reward = await async_rm(args, sample)
            # a second or two when the time grows with the length; hours when it grows with its square
            assert time.process_time() - started < 20.0, (rm_type, form)
            assert math.isfinite(reward["score"] if isinstance(reward, dict) else reward)
    assert not list(tmp_path.iterdir())
