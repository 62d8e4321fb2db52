ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}

ENV CUDA_DEVICE_MAX_CONNECTIONS=1 \
    OMP_NUM_THREADS=1 \
    PIP_NO_CACHE_DIR=1

WORKDIR /workspace/slime
COPY . .
RUN pip install --no-build-isolation "transformer-engine[pytorch]>=2.0" \
 && pip install "megatron-core==0.16.1" \
 && pip install -e ".[gpu]"

CMD ["bash"]
