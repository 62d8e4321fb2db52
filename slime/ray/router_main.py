"""Process entry of the sglang-router: ``python -m slime.ray.router_main '{"port": ...}'`` with RouterArgs fields as JSON.

The router's own command line lacks some policies (consistent_hashing), so it is started through its Python API. Its Rust server
holds the interpreter lock for its whole life: nothing else can run in this process, which is why it is started under
``slime.utils.supervise``.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from sglang_router.launch_router import RouterArgs, launch_router

    launch_router(RouterArgs(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
