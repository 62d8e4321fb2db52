"""Join a running Ray cluster, or start one on this machine with logical slots.

Without GPUs a slot is a number that Ray counts, so ``--actor-num-gpus-per-node 4 --rollout-num-gpus 4`` means eight processes on
the CPU. The head node started here listens on this machine only and ends with the driver.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

logger = logging.getLogger(__name__)

# Devices are assigned by us, not by Ray; these switches keep Ray from rewriting the visible-device variables.
_NO_SET_VISIBLE_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
    "ONEAPI_DEVICE_SELECTOR",
)
_OBJECT_STORE_BYTES = 1 << 30
_CONNECT_DEADLINE_S = 10.0
_EXTRA_CPUS = 4  # manager, driver tasks: processes that hold no slot


def worker_env(args) -> dict[str, str]:
    """Environment of every process of a run: one thread each unless told otherwise, and the driver's import path."""
    threads = str(args.omp_num_threads)
    env = {f"RAY_EXPERIMENTAL_NOSET_{name}": "1" for name in _NO_SET_VISIBLE_DEVICES}
    env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    env |= {"TOKENIZERS_PARALLELISM": "false", "RAY_USE_UVLOOP": "0"}
    # Hooks live beside the launch script: workers import from where the driver does.
    paths = [os.getcwd(), *(path for path in sys.path if path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    return env


def connect(args, num_slots: int) -> bool:
    """Connect this process to Ray; ``num_slots`` logical slots are created when no cluster and no GPU is there.

    Returns:
        True if a local cluster was started here (and ends with ``ray.shutdown``), False if a running one was joined.
    """
    address = args.ray_address or os.environ.get("RAY_ADDRESS")
    if address:
        _check_reachable(address)
        _use_own_token()
    import ray

    # Ray says at each start that its token authentication is on; that is what we want, and no news.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common = {"runtime_env": {"env_vars": worker_env(args)}, "logging_level": logging.WARNING, "log_to_driver": True}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    if address:
        ray.init(address=address, **common)
        logger.info("joined the Ray cluster at %s", address)
    else:
        try:
            with _without_unused_services():
                ray.init(**_local_head(args, num_slots), **common)
        except Exception as error:  # Ray raises the base class itself
            raise RuntimeError(f"Ray could not be started on this machine: {error}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own handler there
    return not address


def _local_head(args, num_slots: int) -> dict:
    """Options of the head node on this machine: no telemetry, no workers started ahead or kept for later."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_raylet_start_wait_time_s": "300",  # on a busy machine Ray's 30 s are not enough
        "RAY_worker_niceness": "0",  # Ray's 15 starves the run as soon as anything else wants the cores
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_num_workers_soft_limit": "0",  # workers that Ray started and has no use for end after a second
        "RAY_enable_metrics_collection": "0",  # nobody reads Ray's own metrics here
        "RAY_task_events_report_interval_ms": "0",
        "RAY_memory_monitor_refresh_ms": "1000",
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # look for new log files every LOG_NAME_UPDATE_INTERVAL_S only
        "LOG_NAME_UPDATE_INTERVAL_S": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Timers of a cluster, and of a dashboard that is not there: each wake-up is paid for by the run.
        "RAY_object_manager_timer_freq_ms": "1000",
        "RAY_local_fs_monitor_interval_ms": "1000",
        "RAY_kill_idle_workers_interval_ms": "1000",
        "RAY_event_stats": "0",
        "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "1",
        "REPORTER_UPDATE_INTERVAL_MS": "600000",
        "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "60",
        "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    }.items():
        os.environ.setdefault(name, value)
    _read_environment_again()
    return {
        "address": "local",  # without it Ray joins whatever cluster another run or `ray start` left on this machine
        "num_cpus": num_slots + _EXTRA_CPUS,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
    } | ({} if args.has_gpu else {"num_gpus": num_slots})


@contextmanager
def _without_unused_services() -> Iterator[None]:
    """Ray started in here has no autoscaler, no API server, and an agent that reports nothing.

    Nobody asks them on a head that ends with the driver, they cost seconds at the start, and Ray has no switches for them.
    """
    from ray._private import node, utils

    replacements = {
        (node.Node, "start_monitor"): lambda *_: None,
        (node.Node, "start_api_server"): lambda *_, **__: None,
        # Its answer makes the agent a minimal one.
        (utils, "get_dashboard_dependency_error"): lambda: ImportError("not wanted here"),
    }
    with ExitStack() as stack:
        for (owner, name), replacement in replacements.items():
            if not hasattr(owner, name):
                continue  # another version of Ray: it starts what it likes
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def _check_reachable(address: str) -> None:
    """Fail within seconds where Ray would try for minutes.

    Raises: RuntimeError when nobody listens at `host:port` (other forms, such as `auto`, are left to Ray).
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise RuntimeError(
            f"no Ray cluster answers at {address} (--ray-address or RAY_ADDRESS): {error}; start one with ray start, or "
            "unset it to use this machine alone"
        ) from None


def _use_own_token() -> None:
    """Show a cluster this user's token, if there is one.

    `ray start` asks for it as soon as a token file exists (any local run leaves one), but `ray.init` with an address does
    not send it unless told. A cluster without authentication ignores it.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", os.path.expanduser("~/.ray/auth_token"))
    if "RAY_AUTH_TOKEN" in os.environ or os.path.isfile(path):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "ray" in sys.modules:  # a script that imports it before us
            _read_environment_again()


def _read_environment_again() -> None:
    """Have Ray's settings in this process follow the environment, which it read when it was imported.

    `ray.init` does so itself, but not where RAY_AUTH_MODE is set: the time to wait for its start was then Ray's own.
    """
    from ray._raylet import Config

    Config.initialize("")


def bind_host() -> str:
    """Address on which this node's servers listen: loopback on a one-node cluster, else the node's own address."""
    import ray

    if os.environ.get("SLIME_HOST_IP"):
        return os.environ["SLIME_HOST_IP"]
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return "127.0.0.1" if num_nodes == 1 else ray.util.get_node_ip_address()
