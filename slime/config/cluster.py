"""Flags of placement, processes, engines and the router (declarations only)."""

# A table: one flag per line.
# fmt: off
from slime.config.spec import Flag, section

F = Flag

CLUSTER = section(
    "cluster",
    "slime/ray",
    [
        F("--actor-num-nodes", "trainer nodes", "int", 1, src="S", owner="slime/config/resolve.py"),
        F("--actor-num-gpus-per-node", "trainer slots (GPUs, or processes on CPU) on each node; 1 when it is not given and the machine has no GPU", "int", 8, src="S", owner="slime/config/resolve.py"),
        F("--rollout-num-gpus", "all inference slots; as many as the trainer has when not given; with --colocate a larger number adds engines on slots of their own", "int", src="S"),
        F("--rollout-num-gpus-per-engine", "slots of one engine", "int", 1, src="U"),
        F("--num-gpus-per-node", "slots of a node, for engine placement; the trainer's number when that is given and below 8", "int", 8, src="U"),
        F("--colocate", "trainer and engines take turns on the same slots; turns both offloads on; weights go through shared memory", action="true", default=False, src="S"),
        F("--offload", "shorthand for --offload-train --offload-rollout", action="true", default=False, src="U"),
        F("--offload-train", "trainer gives memory back while engines generate; the default with --colocate", action="bool", src="U"),
        F("--offload-rollout", "engines on trainer slots give weights and KV cache back while it trains; the default with --colocate", action="bool", src="U"),
        F("--distributed-backend", "process-group backend of the trainer; gloo without GPUs", default="nccl", choices=("nccl", "gloo"), src="U", owner="slime/config/resolve.py"),
        F("--distributed-timeout-minutes", "deadline of a collective and of each call of a weight sync; may be a fraction", "float", 10.0, src="U"),
        F("--train-backend", "trainer engine", default="megatron", choices=("megatron",), src="U", owner="slime/config/resolve.py"),
        F("--train-env-vars", "extra environment of trainer workers as a JSON object, wins over defaults", "json", {}, src="U"),
        F("--http-proxy", "accepted for old scripts", src="U"),
        F("--use-distributed-post", "HTTP posts go out through Ray actors", action="true", default=False, src="U"),
        F("--ray-address", "join this Ray cluster (RAY_ADDRESS works too) instead of starting one", src="O"),
        F("--stall-timeout", "seconds without any progress after which a run gives up with what it last saw", "float", 3600.0, src="O", owner="slime/ray/session.py"),
        F("--log-level", "level of the framework's own log lines", "lower", "warning", choices=("debug", "info", "warning", "error"), src="O", owner="slime/ray/rollout_manager.py"),
        F("--omp-num-threads", "CPU threads of each process", "int", 1, src="O"),
    ],
)

ENGINES = section(
    "engines and router",
    "slime/ray",
    [
        F("--rollout-engine", "engine that generates: SGLang, or the embedded one (slime.engine); auto takes SGLang where a GPU and the package are present", default="auto", choices=("auto", "sglang", "embedded"), src="O", owner="slime/backends"),
        F("--sglang-python", "interpreter of another environment that SGLang is installed in; engines are started with it (this one's when not given)", "path", src="O", owner="slime/backends"),
        F("--rollout-precision", "number format of the engine; the trainer's when not given", choices=("auto", "bf16", "fp16", "fp32"), src="O", owner="slime/backends"),
        F("--sglang-server-concurrency", "requests in flight per engine", "int", 512, src="U", owner="slime/rollout"),
        F("--sglang-config", "YAML file with the engine topology", "path", src="s"),
        F("--prefill-num-servers", "engines that only prefill", "int", src="s"),
        F("--rollout-external-engine-addrs", "host:port of engines started elsewhere", nargs="+", src="s"),
        F("--sglang-router-ip", "address of a router that already runs", src="s"),
        F("--sglang-router-port", "its port", "int", src="s"),
        F("--sglang-router-request-timeout-secs", "seconds the router waits for an engine", "int", 14400, src="U"),
    ],
)

FAULT_TOLERANCE = section(
    "fault tolerance",
    "slime/ray",
    [
        F("--use-fault-tolerance", "watch engines, restart dead ones before the next weight sync", action="true", default=False, src="S"),
        F("--rollout-health-check-interval", "seconds between probes", "float", 30.0, src="U"),
        F("--rollout-health-check-timeout", "deadline of a probe, seconds", "float", 30.0, src="U"),
        F("--rollout-health-check-first-wait", "seconds of grace after each resume", "float", 0.0, src="U"),
    ],
)

FLAGS = CLUSTER + ENGINES + FAULT_TOLERANCE
