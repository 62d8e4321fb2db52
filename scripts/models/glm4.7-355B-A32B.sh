# GLM-4.7: the shape of GLM-4.5.
# Overrides: MODEL_ARGS_NUM_LAYERS, MODEL_ARGS_ROTARY_BASE.
source "$(dirname "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"
