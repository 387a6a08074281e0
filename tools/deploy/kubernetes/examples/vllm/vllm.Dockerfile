# vLLM with Rekindle. `tools/package --only wheel` makes the wheel:
#   docker build -f tools/deploy/kubernetes/examples/vllm/vllm.Dockerfile -t vllm-rekindle:0.1.0 build/dist
ARG VLLM=vllm/vllm-openai:v0.23.0
FROM ${VLLM}
COPY rekindle-*.whl /tmp/
RUN pip install --no-cache-dir /tmp/rekindle-*.whl && rm /tmp/rekindle-*.whl
