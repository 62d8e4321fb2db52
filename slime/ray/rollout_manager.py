"""The Data Buffer's process: one Ray actor that turns prompts into training shards.

Wiring only: rollout function -> dump -> metrics -> conversion -> one object reference per data-parallel rank. It owns the data
source and the served model, and knows nothing of Megatron.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from slime.config import checkpoint_dirs
from slime.observability.progress import Progress
from slime.ray.placement_group import Slots
from slime.rollout import data_state
from slime.rollout.base_types import call_rollout_path, leaves_of
from slime.utils.hook_calls import call_hook, oldest_call
from slime.utils.misc import Box, group_by, settle_garbage_collection
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# Answered while a round is generated. Saving then is right: groups that are in flight count as not consumed.
OBSERVING = ("progress", "check_engines", "dispose", "mark_trained", "save")
ENGINE_CHECK_S = 2.0  # a dead engine ends the run this soon, not after every request to it ran out of retries
DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"


class RolloutManager:
    """See the module. ``generate`` and ``eval`` run one at a time; the methods of ``OBSERVING`` may be called meanwhile."""

    def __init__(self, args, slots: Slots, host: str):
        self._args, self._slots, self._host = args, slots, host
        self._server = None
        self._trained_by: dict[int, list] = {}
        self._without_rows: set[int] = set()  # groups that a conversion of the user's left out
        self._held_out: dict[str, list[Sample]] = {}  # evaluation sets whose loss the trainer computes
        self._handed_out: dict[int, list] = {}  # rounds that are generated elsewhere
        self._progress = Progress()
        self._generating = ThreadPoolExecutor(1, "generate", lambda: asyncio.set_event_loop(asyncio.new_event_loop()))
        self._notes: list[str] = []  # what was decided here and has to be said at start

    def start(self) -> dict[str, Any]:
        """Start engines and router, load hooks and prompts meanwhile.

        Returns:
            {"num_rollout", "num_rollout_per_epoch" (None unless epochs drive the run), "engine_urls", "routers" ({name: (host,
            port)}, empty without engines), "notes"}.

        Raises:
            ValueError, ImportError, FileNotFoundError: a hook or the prompt data is wrong. RuntimeError: no engine came up.
        """
        from slime.observability.logging_utils import configure_logger

        args = self._args
        configure_logger(args.log_level, role="rollout")
        try:
            if not args.debug_train_only:
                from slime.ray.rollout_server import RolloutServer

                self._server = RolloutServer(args, self._slots, self._host)
                self._note_router()
            self._load_functions()
            if self._server is not None:
                self._server.wait_ready()
                args.sglang_router_ip, args.sglang_router_port = self._server.router.host, self._server.router.port
                args.sglang_model_routers = {"default": (args.sglang_router_ip, args.sglang_router_port)}
                self._progress = self._generation_state().progress
        except BaseException:
            self.dispose()
            raise
        settle_garbage_collection()
        return self._info()

    def _note_router(self) -> None:
        fields = self._server.router.kept_fields
        if fields:
            self._notes.append(
                f"requests go through the pass-through router: the sglang-router drops {', '.join(fields)}"
            )

    def _load_functions(self) -> None:
        from slime.backends.megatron_utils import megatron_globals
        from slime.rollout import sft_rollout
        from slime.rollout.data_source import create_data_source
        from slime.rollout.eval_rollout import read_eval_sets
        from slime.rollout.hooks import check_rollout_hooks
        from slime.rollout.rm_hub.default import choose_reward

        args = self._args
        megatron_globals.offer(args)
        check_rollout_hooks(args)
        self._data_source = create_data_source(args)
        if args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and not args.custom_generate_function_path:
            note = choose_reward(args, self._known_prompts())
            self._notes += [note] if note else []
        if self._server is not None and args.eval_interval and args.eval_function_path == DEFAULT_ROLLOUT_FUNCTION:
            read_eval_sets(args)
        if self._server is None and args.eval_interval and args.rollout_function_path == sft_rollout.PATH:
            self._held_out = sft_rollout.held_out_samples(args)

    def _known_prompts(self) -> Iterable:
        """Prompts that can be looked at before the first round: all of a file, the first of a stream, none of other sources."""
        from slime.utils.streaming_data import StreamingPrompts

        dataset = getattr(self._data_source, "dataset", None)
        return [dataset.first] if isinstance(dataset, StreamingPrompts) else dataset or ()

    def _generation_state(self):
        from slime.rollout.sglang_rollout import GenerateState

        return GenerateState(self._args)

    def _info(self) -> dict[str, Any]:
        args = self._args
        num_rollout, per_epoch = args.num_rollout, None
        if num_rollout is None:
            num_prompts = len(self._data_source)
            before, prompts_before = checkpoint_dirs.done_before(args)
            left = max(0, num_prompts * args.num_epoch - prompts_before)
            num_rollout = before + left // args.rollout_batch_size
            per_epoch = num_prompts // args.rollout_batch_size or None
            if num_prompts == 0:
                raise ValueError(
                    f"--num-epoch {args.num_epoch}: the data source {args.data_source_path} has no length, so the end of an epoch is "
                    "not known; give --num-rollout"
                )
            if num_rollout == 0:
                raise ValueError(
                    f"--num-epoch {args.num_epoch} over {num_prompts} prompts of {args.prompt_data} is less than one round of "
                    f"--rollout-batch-size {args.rollout_batch_size}; lower the batch size or raise --num-epoch"
                )
            args.num_rollout = num_rollout
        urls = self._server.engine_urls if self._server else []
        return {
            "num_rollout": num_rollout,
            "num_rollout_per_epoch": per_epoch,
            "engine_urls": urls,
            "routers": args.sglang_model_routers if self._server else {},
            "notes": self._notes,
        }

    def progress(self) -> dict:
        """Snapshot of the running phase; called while ``generate`` runs."""
        return self._progress.snapshot() | oldest_call()

    def generate(self, rollout_id: int) -> tuple[list[Box], dict[str, float]]:
        """One round of samples. Returns (boxed reference per data-parallel rank, metrics); no boxes under rollout-only."""
        args = self._args
        started = time.monotonic()
        if args.deterministic_mode:
            seed_hooks(args.rollout_seed, rollout_id)
        groups, extra = self._groups(rollout_id)
        if not args.load_debug_rollout_data:  # a replayed round is not of this run's prompts
            self._data_source.mark_delivered(groups, rollout_id)
            self._trained_by[rollout_id] = groups
        return self._batch(rollout_id, leaves_of(groups), extra, time.monotonic() - started, {})

    def prompts(self, rollout_id: int) -> list[Sample]:
        """The prompts of a round that is generated elsewhere, one sample for each response, in flight until ``batch``."""
        groups = self._data_source.get_samples(self._args.rollout_batch_size)
        self._handed_out[rollout_id] = groups
        return leaves_of(groups)

    def batch(
        self, rollout_id: int, samples: list[Sample], columns: dict[str, list], seconds: float
    ) -> tuple[list[Box], dict[str, float]]:
        """What ``generate`` does once it has samples, for a round of ``prompts``; prompts that do not come back are filtered.

        Args:
            columns: of the train dict, in place of what the conversion would put there. seconds: that generation took.
        """
        groups = list(group_by(samples, lambda sample: sample.group_index).values())
        known = {leaves_of(group)[0].group_index for group in groups}
        missing = [g for g in self._handed_out.pop(rollout_id, []) if leaves_of(g)[0].group_index not in known]
        self._data_source.mark_finished(missing, "filtered")
        self._data_source.mark_delivered(groups, rollout_id)
        self._trained_by[rollout_id] = groups
        return self._batch(rollout_id, samples, {}, seconds, columns)

    def _batch(
        self, rollout_id: int, samples: list[Sample], extra: dict, seconds: float, columns: dict[str, list]
    ) -> tuple[list[Box], dict[str, float]]:
        """Dump, metrics and conversion of a round's samples."""
        for sample in samples:
            sample.make_plain()
        self._dump(rollout_id, samples)
        metrics = self._rollout_metrics(rollout_id, samples, extra, seconds)
        if self._args.debug_rollout_only:
            self.mark_trained(rollout_id)  # nobody will say so: the round has come to its end here
            return [], metrics
        converting = time.monotonic()
        shards, untrained, without_rows = self._shards(samples, self._args, columns)
        self._without_rows |= without_rows
        self._keep_untrained(rollout_id, untrained, metrics)
        metrics["perf/convert_time"] = time.monotonic() - converting
        return shards, metrics

    def _groups(self, rollout_id: int) -> tuple[list, dict[str, float]]:
        """The round's groups and the rollout function's own metrics, generated or read from a dump."""
        from slime.observability.debug_dump import load_rollout_dump

        args = self._args
        if args.load_debug_rollout_data:
            share = args.load_debug_rollout_data_subsample
            return load_rollout_dump(args.load_debug_rollout_data, rollout_id, share), {}
        output = self._call_rollout("rollout_function_path", rollout_id, evaluation=False)
        return output.samples, output.metrics or {}

    def _call_rollout(self, option: str, rollout_id: int, evaluation: bool):
        """What the function of ``option`` gives, while the engines are looked at.

        Raises:
            RuntimeError: engines or router died. Otherwise as `call_rollout_path`.
        """
        call = self._generating.submit(
            call_rollout_path, self._args, option, rollout_id, self._data_source, evaluation=evaluation
        )
        while not wait([call], timeout=ENGINE_CHECK_S).done:
            self.check_engines()
        if call.exception() is not None:
            self.check_engines()  # one that died is the cause, and the better message
        return call.result()

    def check_engines(self) -> None:
        """Look whether all processes of the server run; called while ``generate`` runs, too.

        Raises:
            RuntimeError: the router or engine processes ended; the message holds the end of their logs.
        """
        if self._server is None:
            return
        self._server.router.check_alive()
        dead = self._server.dead_engines()
        if dead:
            raise RuntimeError(
                f"{len(dead)} of {len(self._server.engine_urls)} rollout engines died: "
                + "\n".join(dead)
                + "\nUsual causes: "
                "out of memory (lower --sglang-mem-fraction-static or --rollout-batch-size), or a bad model folder"
            )

    def offload(self) -> None:
        """Have the engines on trainer slots release weights and KV cache; nobody generates now."""
        if self._server is not None:
            self._server.release_memory()

    def onload(self, tags: list[str]) -> None:
        """Have them take the memory behind ``tags`` back."""
        if self._server is not None:
            self._server.resume_memory(tags)

    def _dump(self, name: int | str, samples: list) -> None:
        from slime.observability.debug_dump import save_rollout_dump

        if self._args.save_debug_rollout_data:
            save_rollout_dump(self._args.save_debug_rollout_data, name, samples)

    def _rollout_metrics(self, rollout_id: int, samples: list, extra: dict, seconds: float) -> dict[str, float]:
        from slime.observability.logging_utils import take_logged
        from slime.observability.rollout_metrics import compute_rollout_metrics

        args = self._args
        if args.load_debug_rollout_data:
            return {}
        if args.custom_rollout_log_function_path:
            if call_hook(args, "custom_rollout_log_function_path", rollout_id, args, samples, extra, seconds):
                return take_logged()
        return compute_rollout_metrics(args, samples, seconds, extra) | take_logged()

    def _shards(
        self, samples: list, args, columns: dict[str, list] | None = None
    ) -> tuple[list[Box], set[int], set[int]]:
        """(one boxed shard per data-parallel rank, indices of groups of which no sample fits into a whole step, and of those
        of which a conversion of the user's made no row)."""
        import ray

        from slime.batching.convert import checked_columns, convert_samples_to_train_data
        from slime.batching.schedule import split_train_data_by_dp
        from slime.batching.transport import pack

        train_data = convert_samples_to_train_data(args, samples) | checked_columns(samples, columns or {})
        shards = split_train_data_by_dp(
            args,
            train_data,
            args.data_parallel_size,
            cp_size=args.context_parallel_size,
            vpp_size=args.virtual_pipeline_model_parallel_size or 1,
            microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_vp_stage or 1,
        )
        positions = {position for shard in shards for position in shard["partition"]}
        rows = train_data["sample_indices"] if args.custom_convert_samples_to_train_data_path else None
        return [Box(ray.put(pack(shard))) for shard in shards], *untrained_groups(samples, rows, positions)

    def _keep_untrained(self, rollout_id: int, untrained: set[int], metrics: dict[str, float]) -> None:
        """Groups that are not trained, because whole steps leave a rest, go back to the buffer for the next round."""
        from slime.rollout.round_end import prepare_for_buffer

        groups = self._trained_by.get(rollout_id, [])
        back = [g for g in groups if isinstance(g, list) and leaves_of(g)[0].group_index in untrained]
        if not back:
            return
        self._trained_by[rollout_id] = [group for group in groups if all(group is not other for other in back)]
        whole = [group for group in back if len(group) == self._args.n_samples_per_prompt]
        self._data_source.mark_undelivered(whole)
        self._data_source.add_samples([prepare_for_buffer(group, rollout_id, restart=False) for group in whole])
        self._data_source.mark_finished([g for g in back if len(g) != self._args.n_samples_per_prompt], "aged_out")
        metrics["rollout/untrained_groups"] = len(back)

    def mark_trained(self, rollout_id: int) -> dict[str, float]:
        """The round's groups reached the weights: the data source may forget them. Returns what became of all prompts."""
        ends: dict[str, list] = {}
        for group in group_by(leaves_of(self._trained_by.pop(rollout_id, [])), lambda leaf: leaf.group_index).values():
            ends.setdefault(self._end_of(group), []).append(group)
        for outcome, groups in ends.items():
            self._data_source.mark_finished(groups, outcome)
        return {f"data/{name}": n for name, n in self._data_source.stats().items() if isinstance(n, int)}

    def _end_of(self, group: list[Sample]) -> str:
        """How a prompt of a trained round ended: trained if some token of its samples was in the loss."""
        if group[0].group_index in self._without_rows:
            self._without_rows.discard(group[0].group_index)
            return "filtered"
        trains = self._args.custom_convert_samples_to_train_data_path  # whose masks are not known here
        if trains or any(not leaf.remove_sample and leaf.effective_response_length for leaf in group):
            return "trained"
        return "failed" if all(leaf.status == Sample.Status.FAILED for leaf in group) else "filtered"

    def eval(self, rollout_id: int, step: int) -> dict[str, float]:
        """Evaluate on every held-out set; the dump is named ``eval_<step>``. Returns metrics."""
        from slime.observability.logging_utils import take_logged
        from slime.observability.rollout_metrics import compute_eval_metrics

        args = self._args
        with untouched_random_numbers():
            output = self._call_rollout("eval_function_path", rollout_id, evaluation=True)
        for_dump = [sample for result in output.data.values() for sample in result.get("samples") or []]
        self._dump(f"eval_{step}", for_dump)
        extra = output.metrics or {}
        if args.custom_eval_rollout_log_function_path:
            if call_hook(args, "custom_eval_rollout_log_function_path", rollout_id, args, output.data, extra):
                return take_logged()
        return compute_eval_metrics(args, output.data, extra) | take_logged()

    def held_out_shards(self) -> dict[str, list[Box]]:
        """For each evaluation set of an SFT run, one boxed shard per data-parallel rank."""
        from slime.batching.schedule import for_one_pass

        return {
            name: self._shards(samples, for_one_pass(self._args, samples))[0]
            for name, samples in self._held_out.items()
        }

    def save(self, directory: str, rollout_id: int) -> None:
        """Write the Data Buffer's state after round ``rollout_id`` into a checkpoint directory."""
        data_state.save(self._args, self._data_source, directory, rollout_id)

    def load(self, directory: str, rollout_id: int) -> None:
        """Continue from what ``save`` wrote."""
        data_state.load(self._args, self._data_source, directory, rollout_id)

    def dispose(self) -> None:
        if self._server is not None:
            self._server.stop()


def untrained_groups(
    samples: list[Sample], row_indices: list | None, positions: Iterable[int]
) -> tuple[set[int], set[int]]:
    """(indices of groups that have rows, none of them trained; of groups without a row).

    Args:
        row_indices: the sample that each row of a user's conversion is of, which may leave out samples, add rows and order them; None:
            row i is sample i. positions: of the rows that are trained.

    Nothing is known, and both are empty, where rows name no sample of the round.
    """
    pairs = {(sample.index, sample.group_index) for sample in samples}
    group_of = dict(pairs)
    if row_indices is None:
        rows = [sample.group_index for sample in samples]
    elif len(group_of) == len(pairs) and all(index is not None and index in group_of for index in row_indices):
        rows = [group_of[index] for index in row_indices]
    else:
        return set(), set()
    trained = {rows[position] for position in positions}
    return set(rows) - trained, {sample.group_index for sample in samples} - set(rows)


@contextlib.contextmanager
def untouched_random_numbers() -> Iterator[None]:
    """What runs inside may draw random numbers; afterwards the process goes on with those that it would have drawn."""
    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_hooks(seed: int, rollout_id: int) -> None:
    """Random numbers of user functions: the same in a round whether or not the run was interrupted before it."""
    import numpy as np
    import torch

    mixed = int.from_bytes(hashlib.blake2b(f"{seed} {rollout_id}".encode(), digest_size=4).digest(), "little")
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)
