"""The same requests to any engine, its replies as plain data, and where two of them differ.

Used by `tools/conformance/run.py` between two live servers and by the tests against replies recorded from SGLang.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

REQUESTS = Path(__file__).with_name("requests.json")
GREEDY_PROMPT = [10, 20, 30, 40, 50, 60]
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m.get('tool_calls') %}{{ m['tool_calls'] | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: values of these keys depend on time, place or chance; their types are compared
VOLATILE = {
    *("created", "e2e_latency", "response_sent_to_client_ts", "timestamp", "queue_time", "decode_throughput"),
    *("model_path", "tokenizer_path", "served_model_name", "root", "message", "per_gpu_checksum", "gen_throughput"),
    *("id", "max_total_num_tokens", "max_running_requests", "cached_tokens", "cache_hit_rate", "per_engine_checksum"),
    "body",
}
#: present or null, by what was asked before
NULLABLE = {"cached_tokens_details", "prompt_tokens_details"}
TOLERANCE = 2e-4


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write the model that replies are recorded from: its template shows tools."""
    from slime.utils.tiny_model import make_tiny_model

    make_tiny_model(folder, init_std=0.2, max_positions=4096, seed=seed)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}, indent=2) + "\n")
    return folder


def load_requests(model: Path, greedy: list[int]) -> list[dict[str, Any]]:
    """Return the requests, with the placeholders of their bodies filled in."""
    text = REQUESTS.read_text().replace('"MODEL"', json.dumps(str(model))).replace('"GREEDY_2"', str(greedy[2]))
    return json.loads(text)


def greedy_ids(http: httpx.Client) -> list[int]:
    """Return the first greedy tokens after GREEDY_PROMPT."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"input_ids": GREEDY_PROMPT, "sampling_params": sampling}
    return http.post("/generate", json=body).raise_for_status().json()["output_ids"]


def exchange(http: httpx.Client, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request; return {"status", "reply"}: the JSON, the JSON objects of a stream, or the text."""
    method = request.get("method", "POST")
    reply = http.request(method, request["path"], json=request.get("body") if method == "POST" else None)
    return {"status": reply.status_code, "reply": _content(reply)}


def _content(reply: httpx.Response) -> Any:
    kind = reply.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]
    if kind.startswith("application/json"):
        return reply.json()
    return {"body": reply.text}


def folded(exchanged: dict[str, Any]) -> dict[str, Any]:
    """Return an exchange whose stream is made independent of how its tokens fell into pieces.

    Of a stream of growing answers the last piece is kept, and the first if there are several; the pieces of an OpenAI
    stream are joined.
    """
    reply = exchanged["reply"]
    if not (isinstance(reply, list) and reply and reply[-1] == "[DONE]"):
        return exchanged
    pieces = reply[:-1]
    if "choices" not in pieces[0]:
        kept = {"first": pieces[0]} if len(pieces) > 1 else {}
        last = {**pieces[-1], "meta_info": {**pieces[-1]["meta_info"], "response_sent_to_client_ts": 0.0}}
        return {**exchanged, "reply": {**kept, "last": last}}
    with_choice = [piece for piece in pieces if piece["choices"]]
    choices = [piece["choices"][0] for piece in with_choice]
    key = "delta" if "delta" in choices[0] else "text"
    texts = [(c["delta"].get("content") or "") if key == "delta" else c["text"] for c in choices]
    logprobs: dict[str, list] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    joined = {"text": "".join(texts), "logprobs": logprobs, "first": pieces[0], "end": choices[-1]["finish_reason"]}
    return {**exchanged, "reply": [joined, *(piece for piece in pieces if not piece["choices"])]}


def differences(expected: Any, got: Any, extra_keys: set[str], missing_keys: set[str], path: str = "") -> list[str]:
    """Return where `got` is not what `expected` is, in words; empty when they agree.

    Keys in `extra_keys` may be in `got` alone, keys in `missing_keys` in `expected` alone.
    """
    if isinstance(expected, dict) and isinstance(got, dict):
        found = [f"{path}.{key}: missing" for key in expected.keys() - got.keys() - missing_keys]
        found += [f"{path}.{key}: not in SGLang's reply" for key in got.keys() - expected.keys() - extra_keys]
        for key in sorted(expected.keys() & got.keys()):
            if key in NULLABLE and None in (expected[key], got[key]):
                continue
            compare = _kinds if key in VOLATILE else differences
            found += compare(expected[key], got[key], extra_keys, missing_keys, f"{path}.{key}")
        return found
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return [f"{path}: {len(got)} entries instead of {len(expected)}"]
        pairs = enumerate(zip(expected, got, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, extra_keys, missing_keys, f"{path}[{i}]")]
    if _kind(expected) != _kind(got):
        return [f"{path}: {got!r} instead of {expected!r}"]
    same = abs(expected - got) <= TOLERANCE if isinstance(expected, float) else expected == got
    return [] if same else [f"{path}: {got!r} instead of {expected!r}"]


def _kinds(expected: Any, got: Any, extra_keys: set[str], missing_keys: set[str], path: str) -> list[str]:
    if isinstance(expected, (dict, list)):
        return differences(expected, got, extra_keys, missing_keys, path)
    return [] if _kind(expected) == _kind(got) else [f"{path}: {got!r} instead of something like {expected!r}"]


def _kind(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return type(value).__name__
    return "number" if isinstance(value, (int, float)) else type(value).__name__
