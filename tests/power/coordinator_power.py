"""The coordinator's state directory: epoch, versions, retirements, drained nodes."""

import signal

from checkpoints import Checkpoint
from lab import Daemon, Failed


class CoordinatorPower:
    # Not the top of the disk: the directories above it are made by the coordinator, too.
    below = "var/lib/state"

    def __init__(self, lab, recording):
        self.lab = lab
        self.recording = recording
        self.roots = {}  # by "MODEL@VERSION", as the publisher was told

    def work(self):
        coordinator = self.begin_term()
        with Daemon(
            self.lab, "agent", "--node-id", "n", "--listen", "127.0.0.1:0", "--store", self.lab.images / "n",
            "--coordinator", self.address,
        ) as agent:  # fmt: skip
            agent.connected()
            self.publish("p", 1)
            self.drain("n", True)
        self.publish("p", 2)
        self.retire("p", 1)
        coordinator.end(signal.SIGKILL)
        coordinator = self.begin_term()
        self.publish("q", 1)
        self.drain("n", False)
        coordinator.end()
        coordinator = self.begin_term()
        self.retire("p", 2)
        self.publish("p", 3)
        coordinator.end()
        # Written by one term, promised by the next. Its own epoch is the first that is synced.
        with self.begin_term(REKINDLE_FAILPOINTS="coordinator.state.before_sync=kill@2") as coordinator:
            self.publish("p", 4, dies=True)
            coordinator.wait()
        coordinator = self.begin_term()
        self.publish("p", 4)
        coordinator.end()

    def begin_term(self, **env):
        coordinator = Daemon(
            self.lab, "coordinator", "--listen", "127.0.0.1:0", "--state", self.recording.disk / self.below,
            env=self.recording.env(**env),
        )  # fmt: skip
        self.address = coordinator.address()
        self.recording.promise("epoch", self.lab.must("status", "--coordinator", self.address)["epoch"])
        return coordinator

    def publish(self, model, version, dies=False):
        name = f"{model}@{version}"
        directory = self.lab.scratch / "models" / name
        if not directory.exists():
            Checkpoint(directory, name)
        self.recording.begin(name)
        store = self.lab.images / f"store-{name}"
        code, answer = self.lab.command("publish", name, directory, "--store", store, "--coordinator", self.address)
        if (code != 0) != dies:
            raise Failed(f"publish {name}: exit code {code}: {answer}")
        if not dies:
            self.roots[name] = answer["root"]
            self.recording.promise(name, {"root": answer["root"], "retired": False})

    def retire(self, model, version):
        name = f"{model}@{version}"
        self.recording.begin(name)
        self.lab.must("retire", name, "--everywhere", "--coordinator", self.address)
        self.recording.promise(name, {"root": self.roots[name], "retired": True})

    def drain(self, node, drained):
        key = f"drained {node}"
        self.recording.begin(key)
        self.lab.must("drain", node, *([] if drained else ["--undo"]), "--coordinator", self.address)
        self.recording.promise(key, drained)

    def learn(self, trace):
        pass

    def glance(self, tree, promises):
        """Files say nothing here; their format is the coordinator's own matter."""
        return ""

    def start(self, tree, promises):
        try:
            with self.lab.image(tree) as image:
                with Daemon(
                    self.lab, "coordinator", "--listen", "127.0.0.1:0", "--state", image / self.below
                ) as coordinator:
                    return self.judge(coordinator.address(), promises)
        except Failed as problem:
            return str(problem)

    def judge(self, address, promises):
        status = self.lab.must("status", "--coordinator", address)
        versions = {f"{v['model']}@{v['version']}": v for v in status["versions"]}
        for key, value in promises.items():
            if key == "epoch":
                if status["epoch"] <= value:
                    return f"epoch {value} was seen before, now it is {status['epoch']}"
            elif key.startswith("drained "):
                # Nobody is a member now: it knows the node only because it is drained.
                code, answer = self.lab.command("drain", key.split()[1], "--undo", "--coordinator", address)
                if (code == 0) != value:
                    return f"{key} is {code == 0} instead of {value}: {answer}"
            elif key not in versions:
                return f"{key} is forgotten"
            elif versions[key]["root"] != value["root"]:
                return f"{key} has root {versions[key]['root']} instead of {value['root']}"
            elif (versions[key]["state"] == "retired") != value["retired"]:
                return f"{key} is {versions[key]['state']}, it was {'' if value['retired'] else 'not '}retired"
        for name, version in versions.items():
            if version["root"] != self.roots.get(name):
                return f"{name} has a root that nobody published: {version['root']}"
        return ""
