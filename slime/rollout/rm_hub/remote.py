"""The `remote_rm` reward type: ask a reward service over HTTP.

POST {"prompt", "response", "label"} to `--rm-url`; the decoded JSON body is the reward (a number or a dict). Connection
errors and busy answers are tried again within the time limit, other errors are raised at once. The last attempt ends shortly before
`--rm-timeout`, so that the error says what the service did and not only that time was up.
"""

from __future__ import annotations

from slime.utils.http_utils import post

MAX_ATTEMPTS = 10
SHARE_OF_TIMEOUT = 0.9


async def remote_rm(args, response: str, sample):
    """Return the service's verdict on one response of a sample.

    Raises:
        ValueError: no --rm-url. HTTPStatusError, RuntimeError: as `http_utils.post`.
    """
    if not args.rm_url:
        raise ValueError("--rm-type remote_rm needs --rm-url")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    deadline_s = SHARE_OF_TIMEOUT * args.rm_timeout
    return await post(args.rm_url, payload, max_retries=MAX_ATTEMPTS, deadline_s=deadline_s)
