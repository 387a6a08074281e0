"""One rank of a real SGLang on a CPU: makes a model twice, loads one by SGLang's own loader and one
by ours, and says where they differ. Its argument is JSON; its last line of output is JSON.

SGLang's wheel of kernels is built for CUDA and does not load without its driver, so the module of
those kernels is an empty one here: models are made, filled and post-processed by SGLang's own code,
and nothing is generated."""
import json
import os
import sys
import traceback
import types
from unittest import mock

job = json.loads(sys.argv[1])
os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_PLUGINS="none", HF_HUB_OFFLINE="1",
                  SGLANG_NCCL_SO_PATH="none.so")  # it would load, and then look for a GPU
sys.modules["common_ops"] = types.ModuleType("common_ops")
sys.modules["common_ops"].__file__ = "no kernels"

import torch  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.eplb import eplb_manager  # noqa: E402
from sglang.srt.lora.lora_manager import LoRAManager  # noqa: E402
from sglang.srt.lora.lora_registry import LoRARef  # noqa: E402
from sglang.srt.model_executor.model_runner_components.load_model_utils import (  # noqa: E402
    build_load_config)
from sglang.srt.model_executor.model_runner_components.weight_updater import (  # noqa: E402
    WeightUpdater)
from sglang.srt.model_loader import loader as loaders  # noqa: E402
from sglang.srt.platforms import current_platform  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_model, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.utils import MultiprocessingSerializer  # noqa: E402

import rekindle.sglang  # noqa: E402
from rekindle._engines import loading  # noqa: E402
from held_model import describe  # noqa: E402

LOADER = "rekindle.sglang.load"


def start():
    """As a scheduler's process does it."""
    arguments = ServerArgs(
        model_path=job["path"], device="cpu", dtype="bfloat16", tp_size=job["world"],
        ep_size=job.get("experts", 1), load_format="rekindle", skip_tokenizer_init=True,
        model_loader_extra_config=json.dumps(job["options"]), custom_weight_loader=[LOADER],
        **job.get("arguments", {}))
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=job["rank"]))
    bootstrap._init_parallel_groups(backend="gloo", dist_init_method=job["meeting"],
                                    server_args=arguments, gpu_id=0)
    config = ModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=config)
    return arguments, config


def load_with(load_config, config):
    loader = loaders.get_model_loader(load_config, config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))


def by_default(config, path, layer=None):
    """What SGLang's own loader makes of files. `layer`: of a draft of several."""
    config.model_path, before = path, config.model_path
    try:
        return load_with(LoadConfig(load_format="auto", draft_model_idx=layer), config)
    finally:
        config.model_path = before


def differences(one, other):
    """Parameters, buffers and what models derive from them."""
    pairs = dict(tensors(other))
    found = dict(tensors(one))
    if "adapter" in job:  # what wraps a layer has its parameters, and tensors of adapters
        pairs = {name: pairs[name] for name in found}
    assert found.keys() == pairs.keys()
    return [name for name, tensor in found.items() if tensor.shape != pairs[name].shape
            or not torch.equal(as_bytes(tensor), as_bytes(pairs[name]))]


def as_bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def tensors(model):
    yield from model.named_parameters()
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value


class Runner:
    """Of SGLang's ModelRunner, what its real WeightUpdater asks of it."""

    def __init__(self, config, model):
        self.model, self.fields = model, {}
        self.weight_updater = WeightUpdater(
            tp_rank=job["rank"], device="cpu", gpu_id=0, model_config=config,
            custom_weight_loaders=get_model().custom_weight_loader,
            get_model=lambda: self.model, recapture_cuda_graph=None,
            update_model_fields=lambda model, **fields: self.fields.update(fields),
            get_model_runner=lambda: self)


class NoDevice:
    """Of a device that a buffer is on."""

    def __init__(self):
        self.device_module = types.SimpleNamespace(
            synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)


def recover(runner, missing):
    """As SGLang's elastic expert parallelism does on a rank that lacks experts, by layer."""
    with torch.no_grad():
        parameters = dict(runner.model.named_parameters())
        for layer, experts in missing.items():
            for part in ("w13", "w2"):
                parameters[f"model.layers.{layer}.mlp.experts.{part}_weight"][experts] = (
                    float("nan"))
    missing = {int(layer): experts for layer, experts in missing.items()}
    eplb_manager.update_expert_location_with_recovery(
        expert_location_updater=types.SimpleNamespace(update=lambda *_, **__: missing),
        model=runner.model, new_expert_location_metadata=None, update_layer_ids=list(missing),
        tp_rank=job["rank"], expert_backup_client=None,
        update_weights_from_disk_callable=runner.weight_updater.update_weights_from_disk,
        ep_dispatch_algorithm="static", init_lplb_solvers_callable=None)


def load_draft(arguments, load_config, draft):
    """Into a process that has its target."""
    config = ModelConfig.from_server_args(
        arguments, model_path=draft["path"], is_draft_model=True)
    load_config.model_loader_extra_config = {**job["options"], "draft_model": draft["model"]}
    model = load_with(load_config, config)
    return {**describe("draft"), "differ": differences(by_default(config, draft["path"]), model)}


def unpinned(make):
    """Memory is pinned by CUDA's driver."""
    return lambda *values, pin_memory=False, **more: make(*values, **more)


def load_adapters(arguments, load_config, runner, config):
    """As SGLang's own manager does after the model was loaded, which it wraps; and what of them is
    not what it makes of them beside a model of files."""
    def manager(load_config, model):
        adapter = LoRARef("0", "tuned", job["adapter"], pinned=False)
        with mock.patch.object(torch, "tensor", unpinned(torch.tensor)):
            made = LoRAManager(
                base_model=model, base_hf_config=config.hf_config, load_config=load_config,
                max_loras_per_batch=2, dtype=config.dtype, server_args=arguments,
                lora_backend="torch_native", lora_paths=[adapter])
        (adapter,) = made.loras.values()
        return {f"{index}.{name}": tensor for index, layer in enumerate(adapter.layers)
                for name, tensor in layer.weights.items()}

    given = manager(load_config, runner.model)
    files = LoadConfig(load_format="auto")
    expected = manager(files, load_with(files, config))
    assert given.keys() == expected.keys()
    return {"names": sorted(given), "differ": [
        name for name in given if not torch.equal(given[name], expected[name])]}


def load_layers(arguments, load_config, draft):
    """Layers for multi-token prediction, each a model, as SGLang's worker makes them; to the first
    one `draft["first"]` is the newest version. Then they are updated from disk's place."""
    config = ModelConfig.from_server_args(
        arguments, model_path=draft["path"], is_draft_model=True)
    models, said = [], []
    for layer, role in enumerate(("draft", "draft.1")):
        load_config.draft_model_idx, catalog = layer, loading.catalog
        if layer == 0:
            see_late(draft["model"], draft["first"])
        models.append(load_with(load_config, config))
        loading.catalog = catalog
        said.append({"loaded": described_layer(config, role, draft["path"], layer, models[-1])})
    for layer, role in enumerate(("draft", "draft.1")):
        updater = Runner(config, models[layer]).weight_updater
        said[layer]["answer"] = updater.update_weights_from_disk(job["path"], "rekindle")
        said[layer]["updated"] = described_layer(
            config, role, draft["later"], layer, models[layer])
    return said


def described_layer(config, role, path, layer, model):
    return {**describe(role), "differ": differences(by_default(config, path, layer), model)}


def see_late(name, version):
    """To this rank, that is the newest version."""
    def catalog(model, wanted, **more):
        return now(model, version if (model, wanted) == (name, "latest") else wanted, **more)
    now, loading.catalog = loading.catalog, catalog


def update(runner, config, step):
    """One of SGLang's own ways to update, and what has come of it."""
    said = {}
    updater = runner.weight_updater
    if step["how"] == "disk":
        said["answer"] = updater.update_weights_from_disk(job["path"], "rekindle")
    elif step["how"] == "recover":
        recover(runner, step["missing"])
    elif step["how"] == "tensor":
        pairs = MultiprocessingSerializer.deserialize(step["payload"])
        updater.begin_weight_update()
        try:
            said["answer"] = updater.update_weights_from_tensor(pairs, load_format=LOADER)
            updater.end_weight_update(run_post_load=False)
        except Exception as why:
            said["error"] = [type(why).__name__, str(why)]
    elif step["how"] == "ipc":
        from checkpoint_engine import worker
        worker.DeviceManager = NoDevice  # where there is no GPU
        said["answer"] = updater.update_weights_from_ipc(types.SimpleNamespace(zmq_handles={
            f"GPU-{current_platform.get_device_uuid()}": step["address"]}))
    said.update(describe())
    if "path" in step:
        said["differ"] = differences(by_default(config, step["path"]), runner.model)
    return said


def main():
    rekindle.sglang.plugin()
    rekindle.sglang.plugin()
    HookRegistry.apply_hooks()
    arguments, config = start()
    load_config = build_load_config(
        server_args=arguments, tp_rank=job["rank"], remote_instance_weight_transporter_engine=None,
        remote_instance_weight_transporter_session_id="", draft_model_idx=None,
        weight_cache_mode="off", weight_cache_socket=None)
    said = {}
    if "late" in job and job["rank"] > 0:
        see_late(*job["late"])
    try:
        for also in job.get("also", ()):
            load_config.model_loader_extra_config = {**job["options"], **also}
            model = load_with(load_config, config)
            said.setdefault("also", []).append(
                {**describe(), "differ": differences(by_default(config, job["path"]), model)})
        load_config.model_loader_extra_config = job["options"]
        model = load_with(load_config, config)
        said.update(describe(), differ=differences(by_default(config, job["path"]), model))
        if "draft" in job:
            said["draft"] = load_draft(arguments, load_config, job["draft"])
        if "layers" in job:
            said["layers"] = load_layers(arguments, load_config, job["layers"])
        runner = Runner(config, model)
        if "adapter" in job:
            said["adapter"] = load_adapters(arguments, load_config, runner, config)
        for step in job.get("updates", ()):  # as the engine's process, which SGLang does not patch
            if "version" in step:
                step["payload"] = MultiprocessingSerializer.serialize(
                    rekindle.sglang.version(*step["version"]))
        for step in job.get("updates", ()):
            if step.get("rank", job["rank"]) != job["rank"]:
                continue
            said.setdefault("updates", []).append(update(runner, config, step))
    except Exception as why:
        traceback.print_exc()
        said["error"] = [type(why).__name__, str(why)]
    print("\n" + json.dumps(said), flush=True)


main()
