"""Embedded inference engine: an HTTP server with SGLang's native API, on CPU or GPU, started as `python -m slime.engine`.

http_api (aiohttp, event loop) -> scheduler (one thread, owns all tensors) -> model, kv_cache, sampler, weights.
"""
