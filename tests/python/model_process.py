"""A process with a model: the trainer that publishes its versions, or a worker that serves them.

Lines of JSON come in, first {"do": "worker", …} or {"do": "trainer", …} with what it needs, then
commands; each has one line as answer. Once it has been told to, a worker serves the same prompt all
the time: commands and updates have their turns between two of these, as in an engine.
models.Process starts it.
"""
import hashlib
import itertools
import json
import os
import queue
import sys
import threading

import torch
import transformers

import rekindle
import rekindle.torch
from rekindle.torch.conversion import spelled

WAIT_S = 120
SIZES = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
                 num_attention_heads=4, num_key_value_heads=2),
    # 2.2 billion parameters: 4.1 GiB.
    "large": dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=9,
                  num_attention_heads=32, num_key_value_heads=8)}


def config_of(size):
    config = transformers.LlamaConfig(**SIZES[size], max_position_embeddings=128,
                                      **spelled({"dtype": torch.bfloat16}))
    config.architectures = ["LlamaForCausalLM"]
    return config


def torch_device(device):
    return torch.device("cpu" if device.startswith("double:") else device)


def prompt(model):
    count = model.config.vocab_size
    return (torch.arange(96, device=model.device).reshape(2, 48) * 331 + 7) % count


def logits(model):
    """A digest of all of them, for the prompt."""
    with torch.no_grad():
        found = model(prompt(model), use_cache=False).logits
    assert found.isfinite().all() and found.unique().numel() > 100
    return hashlib.sha256(found.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()


def weights(model):
    """A digest of every parameter, though only sums of products leave the device."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        words = value.detach().reshape(-1).view(torch.int16)
        sums = []
        for part in words.split(1 << 24):
            places = torch.arange(1, part.numel() + 1, device=part.device)
            sums.append(int((part * (places * 0x9e3779b1)).sum()))
        digest.update(repr((name, str(value.dtype), list(value.shape), sums)).encode())
    return digest.hexdigest()


class Commands:
    """What is to be done, from stdin and from other threads; answers go to what was stdout, where
    nobody else writes."""

    def __init__(self):
        self.inbox = queue.Queue()
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in sys.stdin:
            self.inbox.put(json.loads(line))
        self.inbox.put({"do": "end"})

    def say(self, **fact):
        print(json.dumps(fact), file=self._out, flush=True)


class Trainer:
    """A model with random weights, one step of an optimizer, and versions of it."""

    def __init__(self, commands, size, device):
        self.commands = commands
        torch.manual_seed(11)
        with torch_device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                config_of(size), **spelled({"dtype": torch.bfloat16})).eval()
        commands.say(ready=True)

    def run(self):
        while (command := self.commands.inbox.get())["do"] != "end":
            self.commands.say(**getattr(self, command.pop("do"))(**command))

    def step(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        tokens = prompt(self.model)
        loss = self.model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.item()}

    def publish(self, version, agent):
        """Straight from where the optimizer has them."""
        state = self.model.state_dict()
        published = rekindle.publish(state, version, agent=agent, files={
            "config.json": self.model.config.to_json_string(use_diff=False).encode()})
        return {"logits": logits(self.model), "weights": weights(self.model),
                "bytes": published.bytes,
                "devices": sorted({value.device.type for value in state.values()})}


def stop_amid(commands):
    """The next load stops for ever when half of the tensors are in."""
    def load_into(session, targets, **options):
        half = session.tensor_count // 2
        for info, tensor in itertools.islice(session.entries(WAIT_S), half):
            for target in targets[info.box]:
                target.copy_(tensor)
        commands.say(loading=half, of=session.tensor_count, path=session.device_path)
        threading.Event().wait()

    rekindle.Session.load_into = load_into


class Worker:
    def __init__(self, commands, device, stop, model, version, generation, **place):
        self.commands, self.name, self.generation = commands, model, generation
        self.place = {**place, "device": device, "timeout": WAIT_S}
        self.serving, self.served = False, []
        if stop:
            stop_amid(commands)
        self.model = rekindle.torch.from_pretrained(
            model, version, generation=generation, **self.place)
        self.hold(rekindle.torch.session_of(self.model))
        commands.say(ready=True, path=self.session.device_path)

    def hold(self, session):
        """Serves from now on, and hears of the next version."""
        session.commit(timeout=WAIT_S)
        self.session = session
        threading.Thread(target=self._watch, args=(session,), daemon=True).start()

    def _watch(self, session):
        try:
            self.commands.inbox.put({"do": "move", "version": session.wait_for_update()})
        except rekindle.Error as why:
            self.commands.inbox.put({"do": "fail", "why": why})

    def run(self):
        while True:
            try:
                command = self.commands.inbox.get(block=not self.serving)
            except queue.Empty:
                self.serve_once()
                continue
            if command["do"] == "end":
                return self.session.close()
            answer = getattr(self, command.pop("do"))(**command)
            if answer is not None:
                self.commands.say(**answer)

    def serve_once(self):
        """`served`: [digest, how often], a new one when it changes."""
        found = logits(self.model)
        if not self.served or self.served[-1][0] != found:
            self.served.append([found, 0])
        self.served[-1][1] += 1

    def move(self, version):
        """To what an update brings: into the tensors that the model serves from."""
        self.session.close()
        self.generation += 1
        session = rekindle.attach(self.name, version, generation=self.generation, **self.place)
        session.load_into(self.model, timeout=WAIT_S)
        self.hold(session)

    def fail(self, why):
        raise why

    def serve(self):
        self.serving = True
        return {"serving": True}

    def history(self):
        return {"served": self.served}

    def answers(self):
        return {"logits": logits(self.model), "weights": weights(self.model)}


def main():
    commands = Commands()
    options = commands.inbox.get()
    roles = {"trainer": Trainer, "worker": Worker}
    role = roles.get(options.pop("do"))
    if role is None:  # it was not needed
        return
    device = torch_device(options["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    role(commands, **options).run()


if __name__ == "__main__":
    main()
