"""Put the parts of one engine together: config, weights, cache, model, scheduler, HTTP handlers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from aiohttp import web

from slime.engine.call_runner import CallRunner
from slime.engine.chat_template import ChatTemplate
from slime.engine.generator import Generator
from slime.engine.http_api import HttpApi
from slime.engine.info import ServerInfo
from slime.engine.kv_cache import KVCache
from slime.engine.lora_api import LoraApi
from slime.engine.model import Model
from slime.engine.model_config import MAX_DEFAULT_CONTEXT, ModelConfig, load_model_config
from slime.engine.openai_api import OpenAiApi
from slime.engine.openai_replies import OpenAiWriter
from slime.engine.openai_requests import OpenAiParser
from slime.engine.scheduler import Events, Scheduler
from slime.engine.server_args import ServerArgs
from slime.engine.tokenizer import EngineTokenizer
from slime.engine.weight_updates import WeightUpdates
from slime.engine.weights import Weights
from slime.engine.wire import CallParser, Limits, ReplyWriter
from slime.utils import device, peft_format

logger = logging.getLogger(__name__)


@dataclass
class Engine:
    """What the server needs to run: the thread to start and the routes to serve."""

    scheduler: Scheduler
    api: HttpApi
    openai: OpenAiApi
    lora: LoraApi

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        app = self.api.application()
        self.openai.add_routes(app)
        self.lora.add_routes(app)
        return app


def build_engine(args: ServerArgs, on_events: Callable[[Events], None]) -> Engine:
    """Load the model and return an engine whose thread is not started yet.

    Raises: ValueError for a model or flags that do not fit.
    """
    torch.set_num_threads(args.num_threads)
    config = load_model_config(args.model_path)
    context_length = _context_length(args, config)
    dtype, place = _dtype(args, config), device.device()
    compute_dtype = device.compute_dtype(dtype)
    weights = Weights(config, dtype, place, compute_dtype)
    weights.load(args.model_path)
    keeps_experts = args.enable_return_routed_experts
    if keeps_experts and config.experts is None:
        raise ValueError(f"--enable-return-routed-experts: {args.model_path} has no experts")
    cache = KVCache(config, compute_dtype, place, args.mem_bytes, args.max_running_requests, keeps_experts)
    tokenizer = EngineTokenizer(args.model_path)
    if not tokenizer.is_available:
        logger.warning("no tokenizer in %s: only input_ids are served and text is empty", args.model_path)
    model = Model(config, weights, cache, context_length)
    generator = Generator(
        model,
        cache,
        tokenizer,
        args.max_running_requests,
        one_by_one=args.enable_deterministic_inference,
        keeps_prefixes=not (args.disable_radix_cache or args.enable_deterministic_inference),
    )
    for name, path in args.lora_paths.items():
        generator.adapters.add(generator.adapters.make(name, *peft_format.read_adapter(path), path))
    scheduler = Scheduler(generator, args.weight_version, on_events)
    updates = WeightUpdates(weights, args.weight_update_timeout_s, generator.adapters.checksums)
    limits = Limits(config.vocab_size, context_length, config.eos_token_ids, args.random_seed, keeps_experts)
    info = ServerInfo(args, config, context_length, scheduler)
    parser = CallParser(limits, tokenizer, lambda name: generator.adapters.require(name, scheduler.paused))
    runner = CallRunner(scheduler)
    api = HttpApi(scheduler, updates, parser, ReplyWriter(tokenizer), info, runner, args.incremental_streaming_output)
    openai_parser = OpenAiParser(parser, tokenizer, ChatTemplate(args.model_path), args.model_path, info.name)
    openai = OpenAiApi(runner, openai_parser, OpenAiWriter(tokenizer), info)
    _log_size(weights, cache, context_length)
    lora = LoraApi(scheduler, generator.adapters)
    return Engine(scheduler, api, openai, lora)


def _context_length(args: ServerArgs, config: ModelConfig) -> int:
    if args.context_length is None:
        return min(config.max_positions, MAX_DEFAULT_CONTEXT)
    if args.context_length > config.max_positions:
        raise ValueError(
            f"--context-length {args.context_length} is above max_position_embeddings {config.max_positions} of the model"
        )
    return args.context_length


def _dtype(args: ServerArgs, config: ModelConfig) -> torch.dtype:
    name = config.dtype if args.dtype == "auto" else args.dtype
    return torch.bfloat16 if name in ("bfloat16", "float16") else torch.float32


def _log_size(weights: Weights, cache: KVCache, context_length: int) -> None:
    mib = 1 / 2**20
    if weights.compute_dtype != weights.dtype:
        logger.info("this processor has no %s arithmetic: computing in %s", weights.dtype, weights.compute_dtype)
    logger.info(
        "weights %.1f MiB; KV cache %d bytes per token, up to %.0f MiB: %d requests of 512 tokens, %d of the full "
        "context %d; it grows with the requests",
        weights.num_bytes() * mib,
        cache.bytes_per_token,
        cache.budget_bytes * mib,
        cache.rows_that_fit(min(512, context_length)),
        cache.rows_that_fit(context_length),
        context_length,
    )
