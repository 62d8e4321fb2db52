"""Rewards of a service at --rm-url that is slow, broken or hostile: no round stops, each sample it cost is named, and it is not overrun."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from slime.rollout import generate_state, on_policy_distillation, rm_hub
from slime.rollout.generate_state import GenerateState
from slime.rollout.rm_hub import remote
from slime.rollout.rm_hub.math_verify_pool import num_workers
from slime.rollout.scoring import TEACHER, score_each, score_group, score_samples
from slime.utils.async_utils import run
from slime.utils.http_utils import close_session, get_session
from slime.utils.types import Sample


def answer(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        "Connection: close",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


class Service:
    """A server below HTTP: `behave(path, writer)` writes what it likes. Counts its connections and requests."""

    def __init__(self):
        self.open = self.most_open = 0
        self.paths: list[str] = []

    async def __aenter__(self) -> Service:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        await close_session()

    async def _serve(self, reader, writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
        self.paths.append(head.split()[1].decode())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._behave(self.paths[-1], writer)
            await writer.drain()
        except ConnectionError:
            pass  # the client has gone, which is right
        finally:
            self.open -= 1
            writer.close()

    async def _behave(self, path: str, writer) -> None:
        if path in BEHAVIOUR:
            writer.write(BEHAVIOUR[path])
        elif path == "/slow":
            await asyncio.sleep(0.1)
            writer.write(answer(b"0.5"))
        elif path == "/hang":
            await asyncio.sleep(600)
        elif path == "/drip":
            writer.write(answer(b"", length=10_000))
            for _ in range(10_000):
                writer.write(b"1")
                await writer.drain()
                await asyncio.sleep(0.05)
        elif path == "/flood":
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            for _ in range(1_000_000):
                writer.write(b"1" * 65536)
                await writer.drain()
        elif path == "/busy-once" and self.paths.count(path) == 1:
            writer.write(answer(b"busy", "503 Service Unavailable", "Retry-After: 1"))
        elif path == "/moved":
            writer.write(answer(b"", "307 Temporary Redirect", "Location: /good"))
        else:
            writer.write(answer(b"0.5"))


BEHAVIOUR = {
    "/nothing": b"",
    "/garbage": b"\x00\xff no HTTP at all\r\n\r\n",
    "/half": answer(b'{"score": 1', length=500),
    "/cut": answer(b'{"score": 1.0}', length=9),
    "/empty": answer(b""),
    "/html": answer(b"<html><body>502 Bad Gateway</body></html>"),
    "/null": answer(b"null"),
    "/text": answer(b'"1.0"'),
    "/list": answer(b"[1.0, 2.0]"),
    "/nan": answer(b"NaN"),
    "/infinity": answer(b'{"score": -Infinity}'),
    "/huge-number": answer(b"9" * 5000),
    "/no-utf8": answer(b"\xff\xfe\x00"),
    "/deep": answer(b"[" * 100_000),
    "/refused": answer(b"no", "403 Forbidden"),
    "/broken": answer(b"oops", "500 Internal Server Error"),
    "/throttled": answer(b"later", "429 Too Many Requests", "Retry-After: 3600"),
    "/found": answer(b"", "302 Found", "Location: /good"),
    "/loop": answer(b"", "307 Temporary Redirect", "Location: /loop"),
    "/elsewhere": answer(b"", "307 Temporary Redirect", "Location: http://127.0.0.2:1/good"),
    "/gzip": answer(b"\x1f\x8b broken", "200 OK", "Content-Encoding: gzip"),
}


def scored(
    engine, make_args, path: str, count: int = 1, score=score_samples, **changes
) -> tuple[list[Sample], Service]:
    async def run():
        async with Service() as service:
            args = make_args(engine, custom_rm_path=None, rm_type="remote_rm", rm_url=service.url + path, **changes)
            GenerateState(args)
            samples = [Sample(index=i, prompt="p", response="r", label="l") for i in range(count)]
            get_session()  # loads the HTTP library
            began = time.monotonic()
            await score(args, samples)
            service.seconds = time.monotonic() - began
            return samples, service

    return asyncio.run(run())


@pytest.mark.parametrize("path", [*BEHAVIOUR, "/hang", "/drip", "/flood"])
def test_hostile_service_costs_its_sample_and_nothing_else(engine, make_args, caplog, monkeypatch, path):
    monkeypatch.setattr(remote, "MAX_BYTES", 1 << 20)
    with caplog.at_level(logging.WARNING):
        (sample,), service = scored(engine, make_args, path, rm_timeout=0.3)
    assert (sample.status, sample.reward, sample.remove_sample) == (Sample.Status.FAILED, 0.0, True)
    assert "reward of sample 0 failed" in caplog.text and sample.metadata["reward_error"]
    assert service.seconds < 60
    assert "/good" not in service.paths
    assert path != "/flood" or "answered more than 1048576 bytes" in caplog.text


@pytest.mark.parametrize(("path", "paths"), [("/good", 1), ("/moved", 2), ("/busy-once", 2)])
def test_service_that_is_busy_or_has_moved_on_its_server_is_asked_again(engine, make_args, path, paths):
    (sample,), service = scored(engine, make_args, path)
    assert sample.reward == 0.5 and len(service.paths) == paths
    assert path != "/busy-once" or service.seconds >= 1  # as long as it asked for


@pytest.mark.parametrize("score", [score_samples, score_each, score_group])
def test_service_is_not_overrun_and_waiting_for_a_turn_does_not_count(engine, make_args, monkeypatch, score):
    assert generate_state.NUM_REMOTE_REWARDS == 64
    monkeypatch.setattr(generate_state, "NUM_REMOTE_REWARDS", 4)
    samples, service = scored(engine, make_args, "/slow", 48, score, rm_timeout=1.1)
    assert [sample.reward for sample in samples] == [0.5] * 48  # 1.2 seconds in all
    assert service.most_open == 4


@pytest.mark.parametrize(("grader", "at_a_time"), [("math_verify", num_workers()), ("reward_model", 1)])
@pytest.mark.parametrize("score", [score_each, score_samples])
def test_waiting_for_a_grader_that_answers_few_at_a_time_does_not_count(
    engine, make_args, monkeypatch, score, grader, at_a_time
):
    """Slow answers of others would cost right ones their reward."""
    running, most = [], []

    async def grade(args, response, sample):
        running.append(sample.index)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(sample.index)
        return 1.0

    monkeypatch.setitem(rm_hub.ASYNC_GRADERS, grader, grade)
    samples = [Sample(index=i, response=r"\boxed{1}", label="1") for i in range(20)]
    run(score(make_args(engine, custom_rm_path=None, rm_type=grader), samples))
    assert [sample.reward for sample in samples] == [1.0] * 20 and max(most) <= at_a_time


def test_a_teacher_gets_no_more_requests_than_other_services(engine, make_args, monkeypatch):
    monkeypatch.setattr(generate_state, "NUM_REMOTE_REWARDS", 4)
    running, most = [], []

    async def ask(args, sample):
        running.append(sample.index)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(sample.index)

    monkeypatch.setattr(on_policy_distillation, "score_with_teacher", ask)
    samples = [Sample(index=i) for i in range(20)]
    run(score_each(make_args(engine, custom_rm_path=TEACHER, rm_url="http://teacher/generate"), samples))
    assert [sample.reward for sample in samples] == [0.0] * 20 and max(most) == 4
