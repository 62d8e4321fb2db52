# GLM-5.2: the shape of GLM-5 with another rotary base.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
MODEL_ARGS_ROTARY_BASE="${MODEL_ARGS_ROTARY_BASE:-8000000}" source "$(dirname "${BASH_SOURCE[0]}")/glm5-744B-A40B.sh"
