"""`--rollout-function-path slime.rollout.sleep_rollout.sleep`: engines that serve others while nothing is generated."""

import logging
import time

logger = logging.getLogger(__name__)


def sleep(args, rollout_id, data_source, evaluation=False):
    """Block until the process is stopped."""
    logger.info("serving only: the rollout function sleeps until the run is stopped")
    while True:
        time.sleep(3600)
