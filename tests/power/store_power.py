"""A store on a disk: publish, pull, resume, retire, reuse of files, mending, and the epoch that its agent has heard of.

The store's directory is given in docs/internals/store.md.
"""

import collections
import re
import time

from checkpoints import Checkpoint, read_safetensors
from disk_model import Content
from lab import Daemon, Failed

# The longest that an agent takes to verify what it finds.
VERIFY_S = 20


class StorePower:
    below = "var/lib/store"

    def __init__(self, lab, recording):
        self.lab = lab
        self.recording = recording
        self.checkpoints = {}  # "a@1" -> Checkpoint
        self.pulled = set()  # names of those that come by a pull
        self.manifests = set()  # contents that a manifest had when it got its name
        self.damaged = set()  # contents that cut_short() and rot() made
        self.rotten = None  # the inode of the file in which rot() was last
        self.verdicts = {}
        self.store = recording.disk / self.below

    # The work.

    def work(self):
        self.coordinator = Daemon(
            self.lab, "coordinator", "--listen", "127.0.0.1:0", "--state", self.lab.images / "coordinator"
        )
        coordinator = self.coordinator.address()
        epoch = self.lab.must("status", "--coordinator", coordinator)["epoch"]
        self.source = Daemon(
            self.lab, "agent", "--node-id", "source", "--listen", "127.0.0.1:0", "--store", self.lab.images / "source",
            "--coordinator", coordinator,
        )  # fmt: skip
        self.source.connected()
        self.source_address = self.source.address()
        self.publish("a@1")  # by the command itself
        self.retire("a@1")
        self.publish("a@1")
        self.retire("a@1")
        self.publish("a@2")
        agent = self.begin_agent()
        self.publish("a@3")
        self.retire("a@2")
        self.retire("a@3")
        self.publish("a@4")  # into the files of a@3
        self.publish("a@5")
        self.pull("b@1")
        self.recording.promise("heard", epoch)  # from the source
        self.retire("b@1")
        self.pull("b@2")  # into the files of b@1
        agent.end()
        with self.begin_agent("--coordinator", coordinator) as agent:
            agent.connected()
            self.recording.promise("registered", epoch)
            agent.end()
        self.die_in("store.commit.start", "pull", "b@3")
        self.with_agent(self.pull, "b@3")  # goes on
        self.die_in("store.begin.after_resume", "pull", "b@4")
        self.with_agent(self.pull, "b@5")  # what is left of b@4 is let go
        # Renamed by one life, promised by the next.
        self.die_in("store.commit_staged.after_rename", "publish", "a@6")
        self.with_agent(self.publish, "a@6")
        self.die_in("store.commit.after_manifest_rename", "pull", "b@6")
        self.with_agent(self.pull, "b@6")
        # A copy that cannot be read is replaced; by a pull with and without a resume file.
        self.cut_short("a@6")
        self.with_agent(self.publish, "a@6")
        self.cut_short("b@6")
        self.with_agent(self.pull, "b@6")
        self.die_in("store.commit.after_manifest_rename", "pull", "b@7")
        self.cut_short("b@7")
        self.with_agent(self.pull, "b@7")
        # Tiles that have rotted are fetched from the source into the same file, at once or by the next life.
        self.rot("b@7")
        with self.begin_agent("--coordinator", coordinator, REKINDLE_TEST_DISK_TICK="5") as agent:
            agent.connected()
            self.mend("b@7")
            agent.end()
        self.rot("b@7")
        with self.begin_agent(REKINDLE_FAILPOINTS="store.set_aside.after_resume=kill") as agent:
            if agent.wait() == 0:
                raise Failed("the agent did not die while it set the rest of b@7 aside")
        with self.begin_agent("--coordinator", coordinator) as agent:
            agent.connected()
            self.mend("b@7")
            agent.end()

    def begin_agent(self, *more, **env):
        agent = Daemon(
            self.lab, "agent", "--node-id", "x", "--listen", "127.0.0.1:0", "--store", self.store, *more,
            env=self.recording.env(**env),
        )  # fmt: skip
        agent.address()
        return agent

    def checkpoint(self, name):
        if name not in self.checkpoints:
            self.checkpoints[name] = Checkpoint(self.lab.scratch / "models" / name, name)
        return self.checkpoints[name]

    def publish(self, name, *more):
        directory = self.checkpoint(name).directory
        self.recording.begin(name)
        self.lab.must("publish", name, directory, *more, "--store", self.store, env=self.recording.env())
        self.recording.promise(name, "here")

    def offer(self, name):
        """Gives the version to the source, once."""
        if name in self.pulled:
            return
        directory = self.checkpoint(name).directory
        self.lab.must("publish", name, directory, "--store", self.lab.images / "source")
        self.pulled.add(name)

    def pull(self, name):
        self.offer(name)
        self.recording.begin(name)
        self.lab.must(
            "pull", name, "--from", self.source_address, "--store", self.store, env=self.recording.env()
        )  # fmt: skip
        self.recording.promise(name, "here")

    def with_agent(self, command, *arguments):
        with self.begin_agent() as agent:
            command(*arguments)
            agent.end()

    def die_in(self, step, command, name):
        """An agent is killed at that step of the command."""
        if command == "pull":
            self.offer(name)
            more = ["--from", self.source_address]
        else:
            more = [self.checkpoint(name).directory]
        with self.begin_agent(REKINDLE_FAILPOINTS=f"{step}=kill", REKINDLE_TEST_DISK_TICK="5") as agent:
            self.recording.begin(name)
            code, _ = self.lab.command(command, name, *more, "--store", self.store)
            if code == 0 or agent.wait() == 0:
                raise Failed(f"the agent did not die at {step}")

    def cut_short(self, name):
        """The disk loses the end of a file; what was promised of it is void."""
        self.recording.begin(name)
        self.damaged.add(self.recording.cut_short(self.weights_of(name), 1000))

    def weights_of(self, name):
        (file,) = (self.store / "models" / name).glob("*/model.safetensors")
        return file

    def rot(self, name):
        """A bit flips in each tensor, at rest; what was promised of the copy is void."""
        self.recording.begin(name)
        file = self.weights_of(name)
        sizes = [len(right) for _, _, right in self.checkpoint(name).tensors.values()]
        ends = [sum(sizes[at:]) for at in range(len(sizes))]
        self.damaged.add(self.recording.rot(file, [file.stat().st_size - end + 100 for end in ends]))
        self.rotten = file.stat().st_ino

    def mend(self, name):
        """By an agent that has found the rot when it started; the same file is right again."""
        self.lab.must("verify", "--repair", name, "--store", self.store)
        if self.weights_of(name).stat().st_ino != self.rotten:
            raise Failed(f"{name} was fetched anew, not mended")
        self.recording.promise(name, "here")

    def retire(self, name):
        self.recording.begin(name)
        self.lab.must("retire", name, "--store", self.store, env=self.recording.env())
        self.recording.promise(name, "gone")

    # What must hold.

    def learn(self, trace):
        for number, disk, _ in trace.replay():
            words = trace.lines[number - 1]
            if words[1] == "rename" and words[3].endswith("/rekindle.manifest"):
                self.manifests.add(disk.find(words[3]).current)

    def copies_in(self, tree):
        """NAME -> directories below models/ that say that they are a whole copy, as {file: Content}."""
        found = collections.defaultdict(dict)
        models = self.below + "/models/"
        for path, content in tree.items():
            parts = path[len(models) :].split("/")
            if path.startswith(models) and len(parts) == 3 and content is not None:
                found[parts[0], parts[1]][parts[2]] = content
        copies = collections.defaultdict(list)
        for (name, _), files in found.items():
            committed = "rekindle.manifest" in files and "rekindle.retired" not in files
            if committed and self.damaged.isdisjoint(files.values()):
                copies[name].append(files)
        return copies

    def problem_of(self, name, files):
        """Why this is not a right and whole copy of that version, or ""."""
        key = (name, tuple(sorted((file, content.digest) for file, content in files.items())))
        if key not in self.verdicts:
            whole = files["rekindle.manifest"] in self.manifests
            self.verdicts[key] = self.compare(name, files) if whole else "its manifest is damaged"
        return self.verdicts[key]

    def compare(self, name, files):
        if name not in self.checkpoints:
            return "nobody published it"
        tensors = {}
        for file, content in files.items():
            if file.endswith(".safetensors"):
                try:
                    tensors.update(read_safetensors(content.data))
                except ValueError as problem:
                    return f"{file}: {problem}"
        for tensor, right in self.checkpoints[name].tensors.items():
            if tensor not in tensors:
                return f"{tensor} is not there"
            if tensors[tensor] != right:
                return f"{tensor} is wrong"
        return ""

    def problem_of_epoch(self, tree, heard, registered):
        """Who has heard of an epoch follows no older one, who was registered in one takes it for a measure."""
        content = tree.get(self.below + "/agent/epoch")
        if content is None:
            return f"no epoch is kept, {heard} was heard of" if heard else ""
        text = content.data.decode(errors="replace")
        kept = re.search(r" (\d+)(?: (\d+))? blake3:[0-9a-f]{16}\n$", text)
        if not kept or int(kept[1]) < heard or int(kept[2] or kept[1]) < registered:
            return f"epoch {heard} was heard of, it was registered in {registered}, kept is {text!r}"
        return ""

    def glance(self, tree, promises):
        copies = self.copies_in(tree)
        for name, found in copies.items():
            for files in found:
                if problem := self.problem_of(name, files):
                    return f"a committed copy of {name}: {problem}"
        if problem := self.problem_of_epoch(tree, promises.get("heard", 0), promises.get("registered", 0)):
            return problem
        for name, promise in promises.items():
            if "@" in name and (promise == "here") != (name in copies):
                return f"{name} should be {promise}, the disk has {sorted(copies)}"
        return ""

    def start(self, tree, promises):
        try:
            with self.lab.image(tree) as image:
                store = image / self.below
                with Daemon(
                    self.lab, "agent", "--node-id", "y", "--listen", "127.0.0.1:0", "--store", store
                ) as agent:
                    return self.judge(agent.address(), store, promises)
        except Failed as problem:
            return str(problem)

    def judge(self, address, store, promises):
        here = {name for name, promise in promises.items() if promise == "here"}
        gone = {name for name, promise in promises.items() if promise == "gone"}
        deadline = time.monotonic() + VERIFY_S
        while True:
            status = self.lab.must("status", "--agent", address)
            held = {f"{h['model']}@{h['version']}" for h in status["holdings"]}
            if held & gone:
                return f"the agent holds {sorted(held & gone)}, which was retired"
            if here <= held:
                return self.again(store, promises)
            if time.monotonic() > deadline:
                return f"the agent holds {sorted(held)}, {sorted(here - held)} should be there, too"
            time.sleep(0.05)

    def again(self, store, promises):
        """The same command succeeds, whatever it finds, and the copy then has the right bytes."""
        models = store / "models"
        begun = [name for name in self.checkpoints if name not in promises and (models / name).is_dir()]
        here = [name for name, promise in promises.items() if promise == "here"]
        for name in (begun or here)[-1:]:
            if name in self.pulled:
                command = ["pull", name, "--from", self.source_address]
            else:
                command = ["publish", name, self.checkpoint(name).directory]
            self.lab.must(*command, "--store", store)
            copies = [c for c in (models / name).iterdir() if (c / "rekindle.manifest").exists()]
            if len(copies) != 1:
                return f"{len(copies)} copies of {name} after it was made again"
            files = {f.name: Content.of(f.read_bytes()) for f in copies[0].glob("*.safetensors")}
            if problem := self.compare(name, files):
                return f"{name} after it was made again: {problem}"
        return ""
