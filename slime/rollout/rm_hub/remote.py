"""The `remote_rm` reward type: ask a reward service over HTTP.

POST {"prompt", "response", "label"} to `--rm-url`; the decoded JSON body is the reward (a number or a dict). Connection
errors and busy answers are tried again within the time limit, other errors are raised at once. The last attempt ends shortly before
`--rm-timeout`, so that the error says what the service did and not only that time was up. How many requests are under way at the
same time is the rollout loop's business.
"""

from __future__ import annotations

from typing import Any

from slime.utils.http_utils import post

MAX_ATTEMPTS = 40  # more than the usual time limit has room for
SHARE_OF_TIMEOUT = 0.9
MAX_BYTES = 16 << 20  # of an answer


async def remote_rm(args, response: str, sample):
    """Return the service's verdict on one response of a sample.

    Raises:
        ValueError: no --rm-url. HTTPStatusError, RuntimeError: as `http_utils.post`.
    """
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    return await ask(args, args.rm_url, payload)


async def ask(args, url: str, payload: dict) -> Any:
    """POST to a reward service within the limits of one reward, and return the decoded answer."""
    deadline_s = SHARE_OF_TIMEOUT * args.rm_timeout
    return await post(url, payload, max_retries=MAX_ATTEMPTS, deadline_s=deadline_s, max_bytes=MAX_BYTES)
