"""Small checkpoints, and an oracle that compares files with its own copy of their bytes."""

import json
import random
import struct


class Checkpoint:
    """Tensors by name, and a directory that holds them as a publisher would."""

    def __init__(self, directory, seed, rows=16, tensors=2):
        pick = random.Random(seed)
        self.directory = directory
        self.tensors = {
            f"model.layers.{i}.mlp.up_proj.weight": ("BF16", [rows, 512], pick.randbytes(rows * 1024))
            for i in range(tensors)
        }
        directory.mkdir(parents=True)
        header, data = {}, b""
        for name, (dtype, shape, content) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        (directory / "config.json").write_text('{"model_type": "llama"}\n')


def read_safetensors(data):
    """Name -> (dtype, shape, bytes); ValueError when it is no such file."""
    if len(data) < 8:
        raise ValueError("shorter than its header")
    (length,) = struct.unpack("<Q", data[:8])
    if length > len(data) - 8:
        raise ValueError("its header is cut off")
    header = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if end > len(body):
            raise ValueError("its data is cut off")
        found[name] = (entry["dtype"], entry["shape"], body[begin:end])
    return found
