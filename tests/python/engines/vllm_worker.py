"""One rank of a real vLLM on a CPU: makes a model twice, loads one by vLLM's own loader and one by
ours, and says where they differ. Its argument is JSON; its last line of output is JSON.

vLLM's wheel from PyPI is built for CUDA: its Python runs without a GPU, its kernels do not. So
models are made and filled here, and post-processed where that needs no kernel; none generates."""
import inspect
import json
import os
import sys

job = json.loads(sys.argv[1])
os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS="", HF_HUB_OFFLINE="1",
                  VLLM_LOGGING_LEVEL="ERROR")
if job.get("replicas"):  # of one model, each a process here: vLLM's way for a launcher of one's own
    os.environ.update(VLLM_DP_SIZE=str(job["world"]), VLLM_DP_RANK=str(job["rank"]),
                      VLLM_DP_MASTER_IP="127.0.0.1",
                      VLLM_DP_MASTER_PORT=job["meeting"].rsplit(":", 1)[1])

import torch  # noqa: E402
import vllm.platforms  # noqa: E402

# Before VLLM_TARGET_DEVICE counted, only the wheel's name said that it is for CPUs.
vllm.platforms.builtin_platform_plugins["cpu"] = lambda: "vllm.platforms.cpu.CpuPlatform"

from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import (  # noqa: E402
    ensure_model_parallel_initialized, init_distributed_environment)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402

if job.get("runner") == "v2":
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # noqa: E402
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

import rekindle  # noqa: E402
import rekindle._engines.resident  # noqa: E402
import rekindle.vllm  # noqa: E402
from rekindle._engines import loading  # noqa: E402
from held_model import describe  # noqa: E402

TENSOR_PARALLEL = 1 if job.get("replicas") else job["world"]
asked = []  # the versions whose catalog this rank has read


def configuration():
    ranks = {"distributed_executor_backend": "mp"} if TENSOR_PARALLEL > 1 else {}
    arguments = EngineArgs(
        model=job.get("config", job["path"]), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        tensor_parallel_size=TENSOR_PARALLEL, enable_expert_parallel=job.get("experts", False),
        load_format="rekindle", model_loader_extra_config=job["options"],
        speculative_config=job.get("speculative"),
        weight_transfer_config={"backend": "rekindle"} if (
            "transfer" in job or "serve" in job) else None, **ranks)
    config = arguments.create_engine_config()
    config.parallel_config.rank = 0 if job.get("replicas") else job["rank"]
    return config


def watch_and_break():
    """Notes what is asked for, and makes a step fail where the job says so."""
    catalog = loading.catalog

    def noted(model, version, **more):
        asked.append(version)
        return catalog(model, version, **more)

    def lost(*_, **__):
        raise rekindle.PeerLostError("the agent is gone")

    loading.catalog = noted
    if job.get("break"):
        setattr(loading, job["break"], lost)


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
        self.vllm_config, self.model = config, model
        self.load_config, self.model_config = config.load_config, config.model_config

    def get_model(self):
        return self.model

    def reload_weights(self, weights_iterator=None):
        with set_current_vllm_config(self.vllm_config):
            GPUModelRunner.reload_weights(self, weights_iterator)

    def reset_lora_state(self):
        pass

    reset_encoder_cache = reset_mm_cache = reset_lora_state


class Worker(rekindle.vllm.WorkerExtension):
    def __init__(self, config, model):
        self.vllm_config, self.model_runner = config, Runner(config, model)

    def reload_weights(self, weights_iterator):
        self.model_runner.reload_weights(weights_iterator)


def load(config):
    loader = get_model_loader(config.load_config)
    model = fresh(config)
    loader.load_weights(model, config.model_config)
    return model


def main():
    rekindle.vllm.register()
    rekindle.vllm.register()
    config = configuration()
    with set_current_vllm_config(config), torch.device("cpu"):
        torch.set_default_dtype(torch.bfloat16)
        init_distributed_environment(TENSOR_PARALLEL, config.parallel_config.rank, job["meeting"],
                                     job["rank"], "gloo")
        ensure_model_parallel_initialized(TENSOR_PARALLEL, 1)
        watch_and_break()
        said = {}
        try:
            if "resident" in job:
                said["resident"] = resident(config)
                print("\n" + json.dumps(said), flush=True)
                os._exit(0)  # as a crash: nothing detaches
            if "speculative" in job:
                said["draft"] = draft(config)
                print("\n" + json.dumps(said), flush=True)
                return
            model = load(config)
            said.update(describe(), differ=differences(by_default(config, job["path"]), model))
            said["asked"] = asked
            if "update" in job:
                said["update"] = update(config, model)
            if "plan" in job:
                said["plan"] = planned(config, model)
            if "updates" in job:
                said["updates"] = [attempt(config, model, step) for step in job["updates"]]
            if "reload" in job:
                said["reload"] = reload_by_itself(config, model)
            if "transfer" in job:
                said["transfer"] = transfer(config, model)
            if "serve" in job:
                said["serve"] = serve(config, model)
        except Exception as why:
            said["error"] = [type(why).__name__, str(why)]
    print("\n" + json.dumps(said), flush=True)


def resident(config):
    """Loads by vLLM's steps, with post-processing, and says what a successor must have alike."""
    import logging

    from vllm.model_executor.layers import utils
    from rekindle._engines import on_meta, postprocessing
    from rekindle._engines.resident import _slots
    on_meta.SMALLEST_BYTES = job["resident"].get("smallest", 256)
    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("rekindle").addHandler(handler)
    logging.getLogger("rekindle").setLevel(logging.WARNING)
    def dispatch(layer, remove_weight=False):
        if job["resident"].get("kernels"):
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)

    # vLLM's own needs kernels of its builds for CPUs.
    utils.dispatch_cpu_unquantized_gemm = dispatch
    if job["resident"].get("other"):
        rekindle._engines.resident.FORMAT = 7
    held = []
    if job["resident"].get("lose"):
        made = torch.nn.Module.__init__

        def keeps(self, *args, **named):
            made(self, *args, **named)
            if not held:
                held.append(torch.empty(4096))

        torch.nn.Module.__init__ = keeps
    from vllm.model_executor import utils as executor
    rebuilds = hasattr(executor, "weights_already_processed")
    counted = measured(config) if job["resident"].get("memory") else None
    loader = get_model_loader(config.load_config)
    model = loader.load_model(vllm_config=config, model_config=config.model_config)
    if "version" in job["resident"]:
        Worker(config, model).rekindle_update(job["resident"]["version"])
    now = loading.held("target")
    plain = {postprocessing.shown(at): str(value) for at, value in
             postprocessing.noted(model).items() if postprocessing._encoded(value) is not None}
    return {"rung": now.session.rung, "version": now.session.version, "warned": warned,
            "kept": now.session.resident, "rebuilds": rebuilds,
            "counted": counted,
            "names": sorted(now.names),
            "tensors": sorted(
                        [*slot, type(value).__name__, str(value.dtype), list(value.shape),
                         list(value.stride()), digest(value), sorted(
                             key for key in vars(value) if key != "_rekindle_slot")]
                        for slot, value in _slots(model)),
            "plain": plain, "training": model.training}


def measured(config):
    """The free memory that vLLM's worker counts with, and what its loader says that a copy has: by
    the worker's own steps, on a device of 1000 bytes more than it asks for."""
    import types

    from vllm.v1.worker import gpu_worker, worker_base
    wanted = int(config.cache_config.gpu_memory_utilization * (64 << 30))
    snapshot = types.SimpleNamespace(
        total_memory=64 << 30, free_memory=wanted + 1000, cuda_memory=1 << 30,
        non_torch_memory=1 << 30, device_=torch.device("cpu"), measure=lambda: None)

    class Started:
        vllm_config = config

        def init_device(self):
            loader = get_model_loader(config.load_config)
            if hasattr(worker_base.WorkerWrapperBase, "rekindle_counts"):
                # It has less than it asks for, without the memory of the copy.
                snapshot.free_memory -= job["resident"]["memory"]
                gpu_worker.request_memory(snapshot, config.cache_config)
                self.said = wanted + 1000 - job["resident"]["memory"], snapshot.free_memory, (
                    loader.get_external_weight_memory(config))
            else:
                size = loader.get_external_weight_memory(config)
                self.said = 0, size, size

    wrapper = object.__new__(worker_base.WorkerWrapperBase)
    wrapper.vllm_config, wrapper.worker = config, Started()
    wrapper._worker_extension_cls = None
    wrapper.init_device()
    before, after, size = wrapper.worker.said
    return {"more": after - before, "size": size}


def digest(value):
    import hashlib
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def update(config, model):
    worker = Worker(config, model)
    said = worker.rekindle_update(job["update"]["version"])
    said["differ"] = differences(by_default(config, job["update"]["path"]), model)
    said["status"] = worker.rekindle_status()
    return said


def planned(config, model):
    """What an update to a version would read, and whether the model is what it was."""
    from rekindle.vllm.layout import load_layout
    before, now = dict(model.named_parameters()), loading.held("target")
    options = loading.replace(now.options, version=job["plan"]["version"])
    found = loading.again(model, lambda pairs: model.load_weights(pairs), options, now.place, now,
                          load_layout(model))
    found.session.close()
    after = dict(model.named_parameters())
    return {"same_boxes": sorted(map(str, found.boxes)) == sorted(map(str, now.boxes)),
            "same_parameters": before.keys() == after.keys() and all(
                after[name] is value for name, value in before.items()),
            "differ": differences(by_default(config, job["path"]), model)}


def attempt(config, model, step):
    """An update that may be refused: the error, and what the model has then."""
    worker, said = Worker(config, model), {}
    try:
        worker.rekindle_update(step["version"])
    except Exception as why:
        said["error"] = [type(why).__name__, str(why)]
    said["differ"] = differences(by_default(config, step["path"]), model)
    said["status"] = worker.rekindle_status()["target"]
    said["names"] = sorted(loading.held("target").names)
    return said


def reload_by_itself(config, model):
    """vLLM's reload without arguments asks the loader."""
    config.load_config.model_loader_extra_config = {
        **job["options"], "version": job["reload"]["version"]}
    Runner(config, model).reload_weights()
    return {"differ": differences(by_default(config, job["reload"]["path"]), model),
            "status": rekindle.vllm.WorkerExtension().rekindle_status()}


def transfer(config, model):
    """vLLM's own worker class, without what needs a device, through the updates of the job."""
    worker = real_worker(config, model)
    worker.init_weight_transfer_engine(job["transfer"]["init"])
    said = []
    for step in job["transfer"]["updates"]:
        one = {}
        try:
            worker.start_weight_update()
            for info in step["infos"]:
                if step.get("handed"):  # vLLM 0.23 hands over what loads, or copies
                    engine = worker.weight_transfer_engine
                    load = (model.load_weights if step["handed"] == "checkpoint"
                            else lambda pairs: None)
                    engine.receive_weights(engine.parse_update_info(info), load_weights=load)
                else:
                    worker.update_weights(info)
            worker.finish_weight_update()
        except Exception as why:
            one["error"] = [type(why).__name__, str(why)]
            worker._weight_update_active = False  # as vLLM does, before 0.33 as well
        one["status"] = worker.rekindle_status().get("target")
        one["active"] = worker._weight_update_active
        one["differ"] = differences(by_default(config, step["path"]), model)
        said.append(one)
    worker.weight_transfer_engine.shutdown()
    return said


def real_worker(config, model):
    """vLLM's, with our extension, and nothing that needs a device."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.gpu_worker import Worker as Real
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_: None
    worker = object.__new__(type("Mixed", (rekindle.vllm.WorkerExtension, Real), {}))
    worker.vllm_config, worker.model_runner = config, Runner(config, model)
    worker.speculative_config = None
    worker._weight_update_active = worker._weight_update_is_draft = False
    worker.device, worker.model_config = torch.device("cpu"), config.model_config
    worker.parallel_config, worker._is_checkpoint_format = config.parallel_config, True
    create = WeightTransferEngineFactory.create_engine
    about = ((config.parallel_config, model) if "parallel_config" in inspect.signature(
        create).parameters else (config, torch.device("cpu"), model))  # before 0.33, and since
    worker.weight_transfer_engine = create(config.weight_transfer_config, *about)
    return worker


class Client:
    """vLLM's engine client for its router, with one worker in this process. Each call must be one
    that vLLM's own client takes."""

    def __init__(self, worker):
        self.worker, self.calls = worker, []

    def __getattr__(self, name):
        from vllm.v1.engine.async_llm import AsyncLLM
        signature = inspect.signature(getattr(AsyncLLM, name))

        async def call(*args, **named):
            signature.bind(None, *args, **named)
            self.calls.append(name)
            return True
        return call

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(method)
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]

    async def init_weight_transfer_engine(self, request):
        await self.collective_rpc("init_weight_transfer_engine", args=(request.init_info,))

    async def start_weight_update(self):
        await self.collective_rpc("start_weight_update")

    async def update_weights(self, request):
        await self.collective_rpc("update_weights", args=(request.update_info,))

    async def finish_weight_update(self, weight_version=None):
        await self.collective_rpc("finish_weight_update")


def serve(config, model):
    """Shell scripts against vLLM's own routers of dev mode, and what the model has after each."""
    import socket
    import subprocess
    import threading

    import uvicorn
    from fastapi import FastAPI
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.entrypoints.serve import register_vllm_dev_api_routers
    app, client = FastAPI(), Client(real_worker(config, model))
    app.state.engine_client = client
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    sockets = [socket.create_server(("127.0.0.1", 0))]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    said = []
    for step in job["serve"]:
        client.calls.clear()
        done = subprocess.run(
            ["bash", "-ec", step["script"]], capture_output=True, text=True, timeout=300,
            env={**os.environ, "SERVER": f"http://127.0.0.1:{sockets[0].getsockname()[1]}"})
        said.append({"code": done.returncode, "log": done.stdout + done.stderr,
                     "calls": list(client.calls), "status": client.worker.rekindle_status()[
                         "target"], "differ": differences(by_default(config, step["path"]), model)})
    server.should_exit = True
    thread.join()
    return said


def draft(config):
    """vLLM's own proposer makes and loads the draft: once by our loader, once by vLLM's own."""
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.eagle import EagleProposer
    kind = EagleProposer if job["speculative"]["method"] == "eagle" else DraftModelProposer

    def propose(load_format, options):
        config.load_config.load_format = load_format
        config.load_config.model_loader_extra_config = options
        config.compilation_config.static_forward_context.clear()
        target = get_model_loader(config.load_config).load_model(
            vllm_config=config, model_config=config.model_config)
        proposer = object.__new__(kind)
        proposer.vllm_config = config
        proposer.speculative_config = config.speculative_config
        proposer.draft_model_config = config.speculative_config.draft_model_config
        proposer.method = config.speculative_config.method
        proposer.supports_mm_inputs = proposer.parallel_drafting = False
        proposer.use_local_argmax_reduction = False
        proposer.load_model(target)
        return target, proposer.model

    ours = propose("rekindle", job["options"])
    status = rekindle.vllm.WorkerExtension().rekindle_status()
    theirs = propose("auto", {})
    return {"differ": [differences(one, other) for one, other in zip(theirs, ours)],
            "kind": type(ours[1]).__name__, "status": status,
            "parameters": len(list(ours[1].parameters()))}


main()
