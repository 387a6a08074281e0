# vLLM with Rekindle. `tools/package --only wheel` makes the wheel:
#   docker build -f tools/deploy/kubernetes/examples/vllm/vllm.Dockerfile -t vllm-rekindle:0.2.0 build/dist
ARG VLLM=vllm/vllm-openai:v0.23.0
FROM ${VLLM}
# The wheel needs the C library of the host that made it, or a newer one. Where this image has an older one, pip refuses
# the wheel ("not a supported wheel on this platform"): make it on a host with an older distribution.
COPY rekindle-*.whl /tmp/
RUN pip install --no-cache-dir /tmp/rekindle-*.whl && rm /tmp/rekindle-*.whl
