"""What may differ between the embedded engine's replies and SGLang's, and why. docs/engine.md says it to users."""

from __future__ import annotations

#: keys of ours that SGLang's replies do not have
EXTRA_KEYS = {
    "first",  # a first piece, where the other stream came in one
    "checksums",  # /weights_checker: by Hugging Face name, beside SGLang's own
    "decode_throughput",  # timing of a request, which SGLang reports with --enable-metrics
    "queue_time",
    "dp_rank_count",  # loads, as older clients read them
    "num_total_reqs",
    "error",  # OpenAI errors: below `error` too, where OpenAI itself puts them
    "max_context_length",
    "vocab_size",
    "prompt_tokens_details",  # in the usage of streams
    "completion_tokens_details",
}
#: keys of SGLang's replies that ours do not have
MISSING_KEYS = {
    "first",  # a first piece, where the other stream came in one
    "embedding",  # model info of embedding models
    "decode_moments",  # loads: figures of SGLang's own scheduler
    "num_prealloc_ready_tokens",
    "num_waiting_uncached_tokens",
    "total_prefill_busy_us",
    "total_prefill_uncached_tokens",
}
#: requests that are answered differently on purpose
ACCEPTED = {
    "chat with tools",  # SGLang adds nulls to tools and tool calls before the template sees them
    "compare",  # SGLang's own comparison of weights does not work on a CPU
    "unknown sampling parameter",  # SGLang's `error` is a string here and an object everywhere else
}
