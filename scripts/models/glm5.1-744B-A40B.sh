# GLM-5.1: the shape of GLM-5.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/glm5-744B-A40B.sh"
