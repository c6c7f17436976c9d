# The library and its command on one machine. The wheel of torch brings CUDA and NCCL, so the host needs only NVIDIA's driver and
# container toolkit. deep_ep is not in it: docs/deep-ep.md says how to build it. `make check` lints this file; nobody has built it.
#   docker build -t moe-dispatch . && docker run --rm --gpus all --ipc host moe-dispatch
FROM python:3.12-slim
WORKDIR /opt/moe-dispatch
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY moe_dispatch moe_dispatch
COPY moe_dispatch_testing moe_dispatch_testing
COPY moe_dispatch_tools moe_dispatch_tools
RUN pip install --no-cache-dir --constraint constraints.txt torch numpy \
    && pip install --no-cache-dir --constraint constraints.txt '.[cli,yaml,trace]'
ENTRYPOINT ["moe-dispatch"]
CMD ["doctor"]
