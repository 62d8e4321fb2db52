"""After weights were written to the shared disk, before engines read them, on every training rank.

--update-weight-transport disk --update-weight-disk-dir /shared/weights
--custom-update-weight-post-write-path examples/hooks/weights_written.py:flush
"""

import os


def flush(args, version_dir, rollout_engines):
    """Bring the files out of this machine's memory, for mounts that other machines see only then.

    `version_dir` is complete. `rollout_engines` holds a `slime.utils.engine_client.EngineClient` for each engine: `base_url`,
    `server_info()`, `weight_version()`, ... Engines still generate, with the weights of the version before.
    """
    for entry in os.scandir(version_dir):
        with open(entry.path, "rb") as file:
            os.fsync(file)
