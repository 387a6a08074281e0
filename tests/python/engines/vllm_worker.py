"""One rank of a real vLLM on a CPU: makes a model twice, loads one by vLLM's own loader and one by
ours, and says where they differ. Its argument is JSON; its last line of output is JSON.

vLLM's wheel from PyPI is built for CUDA: its Python runs without a GPU, its kernels do not. So
models are made and filled here, and post-processed where that needs no kernel; nothing is generated."""
import json
import os
import sys

job = json.loads(sys.argv[1])
os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS="", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    ensure_model_parallel_initialized, init_distributed_environment)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402

from vllm.model_executor.model_loader.reload.inplace import reload_weights  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402

import rekindle  # noqa: E402
import rekindle.vllm  # noqa: E402
from rekindle._engines.loading import held  # noqa: E402


def configuration():
    ranks = {"distributed_executor_backend": "mp"} if job["world"] > 1 else {}
    arguments = EngineArgs(
        model=job["path"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        tensor_parallel_size=job["world"], enable_expert_parallel=job.get("experts", False),
        load_format="rekindle", model_loader_extra_config=job["options"], **ranks)
    config = arguments.create_engine_config()
    config.parallel_config.rank = job["rank"]
    return config


def fresh(config):
    """A model whose parameters are not-a-number."""
    config.compilation_config.static_forward_context.clear()
    model = initialize_model(vllm_config=config)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)
    return model


def by_default(config, path):
    model = fresh(config)
    model.load_weights(load_file(os.path.join(path, "model.safetensors")).items())
    return model


def differences(one, other):
    pairs = dict(other.named_parameters())
    return [name for name, tensor in one.named_parameters()
            if not torch.equal(tensor.data.view(torch.uint8), pairs[name].data.view(torch.uint8))]


class Runner:
    """What of vLLM's model runner a worker extension uses, with its real reload."""

    def __init__(self, config, model):
        self.config, self.model = config, model

    def get_model(self):
        return self.model


class Worker(rekindle.vllm.WorkerExtension):
    def __init__(self, config, model):
        self.vllm_config, self.model_runner = config, Runner(config, model)

    def reload_weights(self, weights_iterator):
        with set_current_vllm_config(self.vllm_config):
            reload_weights(self.vllm_config, self.model_runner.model, weights_iterator, None, True)


def load(config):
    loader = get_model_loader(config.load_config)
    model = fresh(config)
    loader.load_weights(model, config.model_config)
    return model


def describe():
    now = held("target")
    if now is None:
        return {}
    return {"bytes": now.session.bytes_total, "instance": now.place.instance,
            "generation": now.place.generation, "version": now.session.version,
            "recorded": now.boxes is not None, "names": sorted(now.names),
            "whole": sorted(i.name for i in now.session.tensors() if i.shape == i.full_shape)}


def main():
    rekindle.vllm.register()
    rekindle.vllm.register()
    config = configuration()
    with set_current_vllm_config(config), torch.device("cpu"):
        torch.set_default_dtype(torch.bfloat16)
        init_distributed_environment(job["world"], job["rank"], job["meeting"], job["rank"], "gloo")
        ensure_model_parallel_initialized(job["world"], 1)
        said = {}
        try:
            model = load(config)
            said.update(describe(), differ=differences(by_default(config, job["path"]), model))
            if "update" in job:
                said["update"] = update(config, model)
        except Exception as why:
            said["error"] = [type(why).__name__, str(why)]
    print("\n" + json.dumps(said), flush=True)


def update(config, model):
    worker = Worker(config, model)
    said = worker.rekindle_update(job["update"]["version"])
    said["differ"] = differences(by_default(config, job["update"]["path"]), model)
    said["status"] = worker.rekindle_status()
    return said


main()
