"""Calls of hooks: async ones from anywhere, errors with the user's line, and which one is running."""

from __future__ import annotations

import asyncio

import pytest

from slime.utils.async_utils import finish, run
from slime.utils.hook_calls import HookError, await_hook, call_path, naming, oldest_call

OPTION = "rollout_sample_filter_path"


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


def test_results_are_finished_outside_and_inside_of_loops_and_in_each_other():
    async def nested(depth):
        return depth if depth == 0 else finish(nested(depth - 1)) + 1

    async def inside():
        return finish(double(3))

    assert (finish(5), finish(double(3)), run(inside()), asyncio.run(inside())) == (5, 6, 6, 6)
    assert run(nested(3)) == 3


def test_waiting_for_a_coroutine_from_a_loop_of_ours_is_refused_not_a_standstill():
    async def wrong():
        return run(double(1))

    async def inside():
        return finish(wrong())

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        run(inside())


@pytest.fixture
def path(tmp_path):
    """``path(text)`` is the path of the function f in a file of this text."""

    def write(text):
        (tmp_path / "user_file.py").write_text(text)
        return f"{tmp_path}/user_file.py:f"

    return write


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_error_shows_the_users_lines_only(kind, path):
    where = path(f"def helper(x):\n    raise KeyError(x)\n\n{kind} f(args, groups):\n    helper('lost')\n")
    with pytest.raises(HookError) as error:
        call_path(where, OPTION, None, [])
    lines = str(error.value).splitlines()
    assert lines[0] == f"--rollout-sample-filter-path {where} raised KeyError: 'lost'"
    assert "user_file.py" in lines[1] and "line 5, in f" in lines[1] and "line 2, in helper" in "".join(lines)
    assert "slime/utils" not in str(error.value) and isinstance(error.value.__cause__, KeyError)


def test_an_error_of_one_hook_inside_of_another_is_told_once_and_exits_are_errors(path):
    where = path("import sys\ndef f(args, groups):\n    sys.exit(3)\n")
    with pytest.raises(HookError, match=r"^--rollout-sample-filter-path .* raised SystemExit: 3") as error:
        with naming("rollout_function_path", "mine.py:outer"):
            call_path(where, OPTION, None, [])
    assert str(error.value).count("raised") == 1


def test_our_own_functions_raise_what_they_raise():
    with pytest.raises(ValueError, match="unknown"):
        with naming("advantage_estimator", "slime.algorithms.mine"):
            raise ValueError("unknown")


def test_the_oldest_running_hook_is_known(path):
    where = path("import asyncio\nasync def f(args, sample):\n    await asyncio.sleep(30)\n")

    async def hang():
        tasks = [asyncio.ensure_future(await_hook(where, "rollout_sample_hook_path", None, None)) for _ in range(2)]
        await asyncio.sleep(0.01)
        known = oldest_call()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return known

    assert oldest_call() == {}
    assert run(hang()) == {"oldest hook": f"--rollout-sample-hook-path {where}"} and oldest_call() == {}
