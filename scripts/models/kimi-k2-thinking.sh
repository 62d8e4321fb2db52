# Kimi K2 Thinking: the shape of K2 with another context extension and epsilon.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS_NORM_EPSILON="${MODEL_ARGS_NORM_EPSILON:-1e-5}" MODEL_ARGS_ROTARY_SCALING_FACTOR="${MODEL_ARGS_ROTARY_SCALING_FACTOR:-64}" source "$(dirname "${BASH_SOURCE[0]}")/kimi-k2.sh"
