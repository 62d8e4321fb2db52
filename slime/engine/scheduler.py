"""The engine thread: takes requests and control calls from a queue, runs steps, hands results over.

Everything that touches tensors happens on this one thread, so a weight update can never fall into a step. Idle means asleep
on a condition. If the thread dies, every open request and call is answered with the reason.
Does not know HTTP: results go to the `on_events` callback as (request, chunk), chunk None once the request ended.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from slime.engine.admission import PrefillBudget, prefill_groups
from slime.engine.generator import Generator
from slime.engine.metrics import Counters
from slime.engine.requests import Chunk, Request, abort_reason
from slime.engine.tokenizer import visible_ids

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "retract", "in_place")
Events = list[tuple[Request, Chunk | None]]


class EngineDead(RuntimeError):
    """The engine thread has ended; the message says why."""


class Scheduler:
    """Continuous batching over one Generator."""

    def __init__(self, generator: Generator, weight_version: str, on_events: Callable[[Events], None]):
        self.generator, self.batch = generator, generator.batch
        self.weight_version = weight_version
        self.counters = Counters()
        self.paused = False
        self.released: set[str] = set()
        self.failure: str | None = None
        self.waiting: deque[Request] = deque()
        self.busy_with: tuple[str, float] | None = None
        self._on_events = on_events
        self._events: Events = []
        self._starting: list[Request] = []  # taken from the queue, perhaps not in the batch yet
        self._inbox: list[Callable[[], None]] = []
        self._refusals: list[Callable[[str], None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- called from any thread ----

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float = 1.0) -> None:
        """Ask the thread to end and wait for it up to the deadline."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(deadline_s)

    @property
    def num_running(self) -> int:
        return self.batch.size

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def submit(self, *requests: Request) -> None:
        """Queue requests together, so that those with the same prompt can start together.

        Raises: EngineDead when nobody will ever answer them.
        """

        def refuse(reason: str) -> None:
            for request in requests:
                self._fail(request, reason)

        self._post(lambda: self.waiting.extend(requests), refuse)

    def call(self, function: Callable[[], Any], name: str = "control call") -> Future:
        """Run `function` on the engine thread between two steps; its result or exception arrives in the future."""
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # the caller went away
                return
            self.busy_with = (name, time.monotonic())
            try:
                future.set_result(function())
            except Exception as error:  # the caller gets it; the engine goes on
                future.set_exception(error)
            finally:
                self.busy_with = None

        def refuse(reason: str) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDead(reason))

        self._post(run, refuse)
        return future

    def _post(self, action: Callable[[], None], refuse: Callable[[str], None]) -> None:
        with self._wake:
            if self.failure is not None or self._stopping:
                raise EngineDead(self.failure or "the engine is shutting down")
            self._inbox.append(action)
            self._refusals.append(refuse)
            self._wake.notify()

    # ---- control calls: on the engine thread, through `call` ----

    def abort(self, rid: str | None) -> int:
        """End the requests with this id (all when None) with what they have; return how many."""
        return self.abort_where(lambda r: rid is None or rid in (r.rid, r.parent_rid))

    def abort_where(self, match: Callable[[Request], bool]) -> int:
        """End the requests that `match` is true for with what they have; return how many."""
        reasons = {i: abort_reason("aborted by request") for i, r in enumerate(self.batch.requests) if match(r)}
        queued = [request for request in self.waiting if match(request)]
        for request in queued:
            self.waiting.remove(request)
            self._end(request, abort_reason("aborted while waiting"))
        self._end_rows(reasons)
        return len(reasons) + len(queued)

    def pause(self, mode: str) -> None:
        """Stop stepping. Running requests end (abort), go back to the queue (retract) or stay as they are (in_place)."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r}: expected one of {', '.join(PAUSE_MODES)}")
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            rows = list(range(self.batch.size))
            requests = [self.batch.flush_row(row) for row in rows]
            for request in requests:
                request.num_retractions += 1
            self.waiting.extendleft(sorted(requests, key=lambda r: r.received_at, reverse=True))
            self.generator.remove(rows)
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def is_busy(self) -> bool:
        """Return whether a cache flush would hit requests: any running, or waiting while not paused."""
        return self.batch.size > 0 or (bool(self.waiting) and not self.paused)

    def flush(self) -> bool:
        """Forget what was kept of ended requests; returns False, doing nothing, while requests run."""
        if self.is_busy():
            return False
        self.generator.prefixes.clear()
        return True

    def set_weight_version(self, version: str) -> None:
        """Stamp tokens generated from now on with `version`."""
        self.weight_version = version
        for row, request in enumerate(self.batch.requests):
            request.note_version(version, int(self.batch.generated[row]))

    # ---- the thread ----

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_inbox():
                    if not self.paused:
                        self._step()
                    self._hand_over()
        except Exception as error:
            logger.exception("engine thread died")
            self._die(f"the engine thread died: {type(error).__name__}: {error}")
        else:
            self._die("the engine is shutting down")

    def _has_work(self) -> bool:
        return not self.paused and bool(self.batch.size or self.waiting)

    def _take_inbox(self) -> bool:
        """Run queued actions, sleeping while there is nothing to do. Returns False when told to stop."""
        with self._wake:
            while not (self._inbox or self._stopping or self._has_work()):
                self._wake.wait()
            actions, self._inbox = self._inbox, []
            refusals, self._refusals = self._refusals, []
            stopping = self._stopping
        for done, action in enumerate(actions):
            try:
                action()
            except Exception:
                self._refusals = refusals[done:] + self._refusals
                raise
        return not stopping

    def _step(self) -> None:
        if self.released and self.waiting:
            reason = f"memory is released ({', '.join(sorted(self.released))}): call /resume_memory_occupation first"
            while self.waiting:
                self._fail(self.waiting.popleft(), reason, is_client_error=True)
        self._starting = self._admit()
        for group in prefill_groups(self._starting):
            first = self.batch.size
            for request in itertools.chain(*group):
                request.started_at = request.started_at or time.time()
                request.note_version(self.weight_version, len(request.output_ids))
                self.counters.prompt_tokens += len(request.prompt_ids) if not request.num_retractions else 0
            reasons = self.generator.prefill(group)
            self._after_tokens(first, sum(map(len, group)), reasons)
        self._starting = []
        if self.batch.size:
            self._after_tokens(0, self.batch.size, self.generator.decode())

    def _admit(self) -> list[Request]:
        """Take waiting requests that fit, in order, and make room for them in the cache."""
        cache, picked, budget = self.generator.cache, [], PrefillBudget()
        length = cache.length if self.batch.size else 0
        while self.waiting:
            request = self.waiting[0]
            if request.lora_name is not None and not self._find_adapter(request):
                continue
            self.generator.find_prefix(request)
            rows = self.batch.size + len(picked) + 1
            new_length = max(length, request.reserved_length)
            if rows > cache.max_rows or (rows > 1 and rows > cache.rows_that_fit(new_length)):
                break
            if not budget.take(request):
                break
            picked.append(self.waiting.popleft())
            length = new_length
        if picked:
            self.generator.make_room(len(picked), length)
        return picked

    def _find_adapter(self, request: Request) -> bool:
        """Give the first waiting request its adapter; without it the request fails and leaves the queue."""
        try:
            request.adapter = self.generator.adapters.of_request(request.lora_name)
        except ValueError as error:
            self._fail(self.waiting.popleft(), str(error), is_client_error=True)
            return False
        return True

    def _after_tokens(self, first: int, count: int, reasons: dict[int, dict]) -> None:
        batch = self.batch
        self.counters.note_tokens(count)
        if batch.streams[first : first + count].any():
            for row in (np.flatnonzero(batch.streams[first : first + count]) + first).tolist():
                if row not in reasons:
                    self._events.append((batch.requests[row], self._chunk(row)))
        self._end_rows(reasons)

    def _chunk(self, row: int) -> Chunk:
        batch = self.batch
        token, num_output = int(batch.last_token[row]), int(batch.generated[row])
        return Chunk([token], [batch.last_logprob(row)], num_output, self.weight_version)

    def _end_rows(self, reasons: dict[int, dict]) -> None:
        if not reasons:
            return
        for row, reason in reasons.items():
            self._end(self.batch.flush_row(row), reason)
        self.generator.finish(list(reasons))

    def _end(self, request: Request, reason: dict) -> None:
        request.finish_reason = reason
        request.finished_at = time.time()
        request.weight_version = request.versions[-1][0] if request.versions else self.weight_version
        self.counters.note_finished(request)
        self._events.append((request, None))

    def _fail(self, request: Request, reason: str, is_client_error: bool = False) -> None:
        request.error, request.is_client_error = reason, is_client_error
        self._events.append((request, None))

    def _hand_over(self) -> None:
        """Give events to the callback, with the texts of all ended requests decoded in one go."""
        if not self._events:
            return
        events, self._events = self._events, []
        tokenizer = self.generator.tokenizer
        for skip in (True, False):
            ended = [r for r, chunk in events if chunk is None and r.finish_reason]
            ended = [r for r in ended if r.params.skip_special_tokens == skip]
            if ended:
                ids = [visible_ids(r.output_ids, r.params, r.finish_reason) for r in ended]
                for request, text in zip(ended, tokenizer.decode_batch(ids, skip), strict=True):
                    request.text = tokenizer.final_text(text, request.params, request.finish_reason)
        self._on_events(events)

    def _die(self, reason: str) -> None:
        with self._wake:
            self.failure = reason
            refusals, self._refusals, self._inbox = self._refusals, [], []
        undelivered = [request for request, _ in self._events]
        live = [*self.batch.requests, *self._starting, *self.waiting, *undelivered]
        self._events = []
        for request in {id(request): request for request in live}.values():
            self._fail(request, reason)
        for refuse in refusals:
            refuse(reason)
        events, self._events = self._events, []
        self._on_events(events)
