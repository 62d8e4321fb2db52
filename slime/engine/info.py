"""What the engine says about itself: model, server settings, load, metrics, single weights.

Read-only. Counts are read without locks and may be one step old. Knows no sockets.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Any

from slime.engine.metrics import prometheus_text
from slime.engine.model_config import ModelConfig
from slime.engine.scheduler import Scheduler
from slime.engine.server_args import VERSION, ServerArgs


class ServerInfo:
    """Reply objects of the GET routes."""

    def __init__(self, args: ServerArgs, config: ModelConfig, context_length: int, scheduler: Scheduler):
        self._args, self._config, self._scheduler = args, config, scheduler
        self._context_length = context_length
        self.name = args.served_model_name or args.model_path

    def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self._args.model_path,
            "served_model_name": self.name,
            "tokenizer_path": self._args.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": self._config.model_type,
            "architectures": [self._config.architecture],
            "weight_version": self._scheduler.weight_version,
            "disaggregation_mode": "null",
            "max_context_length": self._context_length,
            "vocab_size": self._config.vocab_size,
        }

    def server_info(self) -> dict[str, Any]:
        capacity = self._capacity_tokens()
        return {
            **self._args.as_dict(),
            **self.model_info(),
            "version": VERSION,
            "engine": "slime.engine",
            "status": "ready" if self._scheduler.failure is None else "dead",
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "ep_size": 1,
            "moe_dp_size": 1,
            "num_gpus": 1,
            "encoder_only": False,
            "context_length": self._context_length,
            "max_total_num_tokens": capacity,
            "max_req_input_len": self._context_length - 1,
            "internal_states": [{"last_gen_throughput": self._scheduler.counters.throughput(), **self._counts()}],
        }

    def models(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
        model |= {"root": self.name, "parent": None, "max_model_len": self._context_length}
        adapters = [
            {**model, "id": name, "root": path, "parent": self.name, "max_model_len": None}
            for name, path in self._scheduler.generator.adapters.paths().items()
        ]
        return {"object": "list", "data": [model, *adapters]}

    def weight_version(self) -> dict[str, Any]:
        return {"weight_version": self._scheduler.weight_version}

    def loads(self) -> dict[str, Any]:
        """/v1/loads: one entry, this engine."""
        running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
        used, capacity = self._used_tokens(), self._capacity_tokens()
        now = time.time()
        load = {
            "timestamp": now,
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": used,
            "num_total_tokens": used,
            "num_active_tokens": used,
            "max_total_num_tokens": capacity,
            "token_usage": used / capacity,
            "gen_throughput": self._scheduler.counters.throughput(),
            "cache_hit_rate": self._scheduler.counters.cache_hit_rate(),
            "utilization": running / self._scheduler.generator.cache.max_rows,
            "max_running_requests": self._scheduler.generator.cache.max_rows,
        }
        return {
            "timestamp": datetime.fromtimestamp(now, timezone.utc).isoformat(),
            "version": VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "dp_rank_count": 1,
            "loads": [load],
        }

    def load_list(self) -> list[dict[str, Any]]:
        """/get_load, as sglang-router polls it."""
        running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
        tokens = self._used_tokens()
        return [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens}]

    def metrics(self) -> str:
        used, capacity = self._used_tokens(), self._capacity_tokens()
        gauges = {
            "num_running_reqs": self._scheduler.num_running,
            "num_queue_reqs": self._scheduler.num_waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": capacity,
            "token_usage": used / capacity,
            "kv_cache_bytes": self._scheduler.generator.cache.num_bytes(),
            "is_paused": float(self._scheduler.paused),
        }
        return prometheus_text(self._scheduler.counters, gauges, self.name)

    def weight_values(self, name: str, count: int) -> list:
        """Return the first `count` rows of a weight as nested lists. On the engine thread.

        Raises: ValueError for an unknown name.
        """
        weights = self._scheduler.generator.model.weights
        if name not in weights.layout:
            raise ValueError(f"unknown weight {name!r}")
        return weights.view(name)[:count].float().tolist()

    def _counts(self) -> dict[str, int]:
        return {"num_running_reqs": self._scheduler.num_running, "num_waiting_reqs": self._scheduler.num_waiting}

    def _used_tokens(self) -> int:
        batch = self._scheduler.batch
        return int(batch.length[: batch.size].sum())

    def _capacity_tokens(self) -> int:
        cache = self._scheduler.generator.cache
        return max(cache.budget_bytes // cache.bytes_per_token, self._context_length)
