"""all-MiniLM-L6-v2, published on one agent and pulled on another."""
import pathlib
import subprocess

import pytest
import safetensors.torch
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
SENTENCES = ["Weights travel between hosts.", "Gewichte wandern zwischen Rechnern.", "A short one."]


def embeddings(directory):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(directory, local_files_only=True).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)


def tensors(directory):
    result = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        result.update(safetensors.torch.load_file(path))
    return result


@pytest.fixture(scope="module")
def published(rekindle, real_model):
    return rekindle.publish("minilm@1", real_model)


@pytest.fixture(scope="module")
def pulled(rekindle, published, memory_directory):
    summary = rekindle.run("pull", "minilm@1", "--store", rekindle.store("b"))
    assert summary["root"] == published["root"]
    rekindle.pull_to("minilm@1", memory_directory / "minilm")
    return memory_directory / "minilm"


def test_every_tensor_is_bit_identical(real_model, pulled):
    original, copy = tensors(real_model), tensors(pulled)
    assert original.keys() == copy.keys()
    for name, tensor in original.items():
        assert tensor.dtype == copy[name].dtype and tensor.shape == copy[name].shape, name
        assert tensor.numpy().tobytes() == copy[name].numpy().tobytes(), name


def test_transformers_computes_the_same_embeddings(real_model, pulled):
    assert torch.equal(embeddings(real_model), embeddings(pulled))


def test_the_small_files_come_along(real_model, pulled):
    for name in ["config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"]:
        assert (pulled / name).read_bytes() == (real_model / name).read_bytes(), name


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_tensor_parallel_shards_together_are_the_original(rekindle, published, real_model,
                                                              memory_directory, ranks):
    parts = []
    for rank in range(ranks):
        part = memory_directory / f"tp-{rank}-{ranks}"
        summary = rekindle.pull_to("minilm@1", part, "--shard", f"tp={rank}/{ranks}")
        assert summary["bytes"] < published["bytes"]
        parts.append(part)
    done = subprocess.run([ROOT / "tools/compare-checkpoints", real_model, *parts],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_shard_alone_is_not_the_original(rekindle, published, real_model, memory_directory):
    part = memory_directory / "alone"
    rekindle.pull_to("minilm@1", part, "--shard", "tp=1/2")
    done = subprocess.run([ROOT / "tools/compare-checkpoints", real_model, part],
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert "elements are there" in done.stderr


def test_a_checkpoint_of_many_files_loads_with_its_index(rekindle, real_model, memory_directory):
    model = transformers.AutoModel.from_pretrained(real_model, local_files_only=True)
    sharded = memory_directory / "sharded"
    model.save_pretrained(sharded, max_shard_size="20MB", safe_serialization=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    rekindle.publish("minilm@2", sharded)
    rekindle.pull_to("minilm@2", memory_directory / "sharded-copy")
    copy = transformers.AutoModel.from_pretrained(memory_directory / "sharded-copy",
                                                  local_files_only=True)
    left, right = model.state_dict(), copy.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_only_the_named_tensors(rekindle, published, memory_directory):
    directory = memory_directory / "layer0"
    rekindle.pull_to("minilm@1", directory, "--tensors", r"^encoder\.layer\.0\.")
    names = tensors(directory).keys()
    assert names and all(name.startswith("encoder.layer.0.") for name in names)
