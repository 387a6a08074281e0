"""A rolling upgrade from the previous release, under load, and back: every pull ends with the right bytes, no version is
lost, no stored byte is fetched again."""
import pathlib
import shutil
import tempfile

import pytest
from fleet import NEW, OLD, Fleet, Load, digest_of_directory, eventually, make_checkpoint


@pytest.fixture
def directory():
    path = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-upgrade.", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Rolling:
    """A fleet whose parts are replaced one by one, and the checks that hold after each step."""

    def __init__(self, directory, etcd, secret):
        self.fleet = Fleet(directory, etcd, secret)
        self.load = Load(self.fleet)
        self.coordinators = ["c1", "c2"] if etcd else ["c1"]
        self.replaced = 0

    def start(self, release):
        fleet = self.fleet
        for name in self.coordinators:
            fleet.start_coordinator(release, name)
        for name in fleet.AGENTS:
            fleet.start_agent(release, name)
        base = make_checkpoint(fleet.directory / "base", 7, 8192)
        self.base_digest = digest_of_directory(base)
        self.base_root = fleet.publish(release, "base@1", base, "a")["root"]
        for name in fleet.AGENTS[1:]:
            fleet.pull_here(release, "base@1", name)
        self.load.start()
        self.load.progress()
        for name in fleet.AGENTS:
            self.start_worker(release, name)

    def start_worker(self, release, agent):
        # One of them gets its weights on a device, over the channel to the agent's device process.
        return self.fleet.start_worker(release, agent, "m", *(["double:0"] if agent == "c" else []))

    def replace_coordinators(self, release):
        for name in self.coordinators:
            # With etcd this is once the leader and once the other one, so each release takes over from the other.
            self.step(release, name, lambda name=name: self.fleet.start_coordinator(release, name))

    def replace_agents(self, release):
        for name in self.fleet.AGENTS:
            held = self.fleet.holdings(name)
            assert ("base", 1) in held
            self.step(release, name, lambda name=name: self.fleet.start_agent(release, name))
            # The copy was adopted.
            again = self.fleet.pull_here(release, "base@1", name)
            assert again["fetched_bytes"] == 0 and again["root"] == self.base_root, again

    def replace_workers(self, release):
        for name in self.fleet.AGENTS:
            worker = self.fleet.running[f"worker-{name}"]
            worker.stop()
            self.start_worker(release, name)
            self.check_workers()

    def step(self, release, name, start):
        """Replaces one daemon while a pull of seconds runs."""
        self.replaced += 1
        out = self.fleet.directory / f"base-{self.replaced}"
        pull = self.fleet.start_pull(release, "base@1", out)
        pulls = lambda: [p for p in self.fleet.status()["pulls"] if p["model"] == "base"]
        eventually(lambda: pulls() or pull.popen.poll() is not None, "the pull does not begin")
        assert pull.popen.poll() is None, f"the pull ended before the replacement: {pull.said()}"
        self.fleet.replace(name, start)
        assert pull.wait() == 0, pull.said()
        assert digest_of_directory(out) == self.base_digest
        shutil.rmtree(out)
        self.load.progress()
        self.check_versions()
        self.check_workers()

    def check_versions(self):
        def missing():
            roots = self.fleet.roots()
            expected = {"base@1": self.base_root, **self.load.published}
            return {name: root for name, root in expected.items() if roots.get(name) != root}
        # The load publishes and retires meanwhile.
        eventually(lambda: not missing(), lambda: f"lost versions: {missing()}")

    def check_workers(self):
        """Each of them serves a version that is newer than now, with the right bytes."""
        now = max(self.load.digests)
        for name in self.fleet.AGENTS:
            worker = self.fleet.running[f"worker-{name}"]
            eventually(lambda: any(line["version"] >= now for line in worker.lines()) or worker.fail_if_ended(),
                       worker.said)
            for line in worker.lines():
                assert line["digest"] == self.load.digests[line["version"]], line

    def end(self):
        self.load.stop()
        self.check_versions()
        self.check_workers()
        print(f"{self.replaced} daemons replaced, {len(self.load.digests)} versions, {self.load.pulls} pulls compared")


    def close(self):
        self.load.over.set()
        if self.load.is_alive():
            self.load.join()
        self.fleet.close()


@pytest.fixture(params=["etcd", "directory", "secret"])
def rolling(request, directory):
    made = Rolling(directory, request.param == "etcd",
                   "a secret of an upgraded fleet" if request.param == "secret" else None)
    yield made
    made.close()


def test_coordinators_first_then_agents_then_workers_and_back(rolling):
    rolling.start(OLD)
    rolling.replace_coordinators(NEW)
    rolling.replace_agents(NEW)
    rolling.replace_workers(NEW)
    rolling.replace_coordinators(OLD)
    rolling.replace_agents(OLD)
    rolling.end()


def test_workers_first_then_agents_then_coordinators(rolling):
    rolling.start(OLD)
    rolling.replace_workers(NEW)
    rolling.replace_agents(NEW)
    rolling.replace_coordinators(NEW)
    rolling.end()
