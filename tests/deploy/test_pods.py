"""The Pods of the manifests, run on this machine with their own command lines, probes, users and mounts."""
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

import pytest
from manifests import BINARY, MANIFESTS, containers, named, pod_of, render
from pods import PATIENCE_S, ROOT_FILES, Cluster, can_run_pods, eventually
from test_manifests import with_components

pytestmark = pytest.mark.skipif(not can_run_pods(), reason="no root, no namespaces or no bubblewrap here")
CAP_SYS_NICE = 23
SECRET = {"rekindle": {"secret": b"a secret of more than 16 bytes\n"}}


@pytest.fixture
def directory():
    """On tmpfs: stores of nodes lie in it."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-pods.", dir="/dev/shm"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cluster(directory, request):
    """A cluster with the base and the components of the test's parameter, and nothing started."""
    overlay = directory / "overlay"
    overlay.mkdir()
    objects = render(with_components(overlay, *getattr(request, "param", ())))
    made = Cluster(directory, objects, BINARY, dict(SECRET))
    yield made
    made.close()


def components(*names):
    return pytest.mark.parametrize("cluster", [names], indirect=True, ids=["+".join(names) or "base"])


def start_agents(cluster, *nodes):
    agents = [cluster.start("DaemonSet", "rekindle-agent", n, node) for n, node in enumerate(nodes)]
    for agent in agents:
        agent.wait_until("startupProbe")
    return agents


def ports_of(pod):
    return {port["containerPort"] for port in pod.main["ports"]}


def write_checkpoint(cluster):
    """In the volume that a user keeps checkpoints in."""
    claim = cluster.directory / "claims/checkpoints"
    claim.mkdir(parents=True, exist_ok=True)
    subprocess.run([BINARY, "demo", "--model-only", claim / "small", "--gib", "0.02"], check=True, capture_output=True,
                   timeout=PATIENCE_S, stdin=subprocess.DEVNULL)


def fleet(pod):
    return json.loads(pod.execute("rekindle", "status", "--json"))


@components("checkpoints")
def test_a_version_goes_from_a_volume_to_the_memory_of_every_node(cluster):
    write_checkpoint(cluster)
    coordinator = cluster.start("StatefulSet", "rekindle-coordinator")
    coordinator.wait_until("readinessProbe")
    one, other = start_agents(cluster, "node-a", "node-b")
    for pod in (coordinator, one, other):
        assert pod.listening() == ports_of(pod)
        assert all(pod.passes(probe) for probe in ("readinessProbe", "livenessProbe"))
    assert coordinator.rights() == (65532, 0)
    assert one.rights() == (0, 1 << CAP_SYS_NICE)
    assert {node["node"] for node in fleet(coordinator)["nodes"]} == {"node-a", "node-b"}

    one.execute("rekindle", "publish", "small@1", "/checkpoints/small")
    assert "every byte verified" in other.execute("rekindle", "pull", "small")

    # What an upgrade does to each agent: its successor finds the copies in the memory of the node.
    assert other.terminate() == 0
    assert not other.passes("livenessProbe")
    successor = cluster.start("DaemonSet", "rekindle-agent", 2, "node-b")
    successor.wait_until("readinessProbe")
    assert "small@1" in successor.execute("rekindle", "status", "--agent=unix:/dev/shm/rekindle/agent/agent.sock")

    assert "node-b gets no new readers" in one.execute("rekindle", "drain", "node-b")
    assert "takes part again" in one.execute("rekindle", "drain", "node-b", "--undo")
    assert coordinator.terminate() == 0


@components("metrics")
def test_every_daemon_is_scraped_at_the_port_of_its_annotation(cluster):
    coordinator = cluster.start("StatefulSet", "rekindle-coordinator")
    coordinator.wait_until("readinessProbe")
    agent, = start_agents(cluster, "node-a")
    for pod, other, metric in ((coordinator, agent, "rekindle_coordinator_leading 1"),
                               (agent, coordinator, "rekindle_coordinator_connected 1")):
        assert pod.listening() == ports_of(pod)
        annotations = pod.template["metadata"]["annotations"]
        assert annotations["prometheus.io/scrape"] == "true"
        url = f"http://{pod.ip}:{annotations['prometheus.io/port']}/metrics"
        eventually(lambda: metric in other.fetch(url), f"{metric} is not in {url}")


@components()
def test_the_coordinator_keeps_its_state_on_its_volume(cluster):
    first = cluster.start("StatefulSet", "rekindle-coordinator")
    first.wait_until("readinessProbe")
    assert fleet(first)["epoch"] == 1
    first.kill()
    second = cluster.start("StatefulSet", "rekindle-coordinator")
    second.wait_until("readinessProbe")
    assert fleet(second)["epoch"] == 2


@components("etcd", "checkpoints")
def test_another_coordinator_leads_when_the_leader_is_lost(cluster):
    write_checkpoint(cluster)
    members = [cluster.start("StatefulSet", "rekindle-etcd", n) for n in range(3)]
    for member in members:
        member.wait_until("readinessProbe")
        assert member.listening() == ports_of(member)
    coordinators = [cluster.start("StatefulSet", "rekindle-coordinator", n) for n in range(3)]
    agent, = start_agents(cluster, "node-a")
    eventually(lambda: "node-a" in agent.asked("rekindle", "status"), "the agent has not registered")
    agent.execute("rekindle", "publish", "small@1", "/checkpoints/small")
    leader, = [pod for pod in coordinators if pod.listening()]
    assert leader.listening() == ports_of(leader)
    epoch = fleet(agent)["epoch"]
    members[0].kill()
    leader.kill()
    eventually(lambda: "small@1" in agent.asked("rekindle", "status"), "nobody leads, or the version is lost")
    assert fleet(agent)["epoch"] > epoch
    assert len([pod for pod in coordinators if pod is not leader and pod.listening()]) == 1


@components()
def test_no_pod_starts_without_the_secret(cluster):
    cluster.secrets.clear()
    for kind, name in (("StatefulSet", "rekindle-coordinator"), ("DaemonSet", "rekindle-agent")):
        with pytest.raises(AssertionError, match="secret rekindle not found"):
            cluster.start(kind, name)


@components()
def test_a_secret_that_is_too_short_ends_both_daemons_with_one_line(cluster):
    cluster.secrets["rekindle"] = {"secret": b"short"}
    for kind, name in (("StatefulSet", "rekindle-coordinator"), ("DaemonSet", "rekindle-agent")):
        pod = cluster.start(kind, name)
        assert pod.process.wait(PATIENCE_S) == 2
        assert "has 5 bytes, it needs at least" in pod.tail()


@components()
def test_an_agent_with_another_secret_stays_outside(cluster):
    coordinator = cluster.start("StatefulSet", "rekindle-coordinator")
    coordinator.wait_until("readinessProbe")
    cluster.secrets["rekindle"] = {"secret": b"another secret of more than 16 bytes"}
    agent, = start_agents(cluster, "node-a")
    agent.execute("rekindle", "status", code=7)
    assert fleet(coordinator)["nodes"] == []


@components("checkpoints")
def test_a_node_without_enough_memory_refuses_a_version_and_names_the_bytes(cluster):
    """The memory of the node, not the budget, is what runs out."""
    write_checkpoint(cluster)
    store = cluster.directory / "node-a/dev/shm/rekindle"
    store.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M,mode=0700", "none", store], check=True)
    try:
        cluster.start("StatefulSet", "rekindle-coordinator").wait_until("readinessProbe")
        agent, = start_agents(cluster, "node-a")
        told = agent.execute("rekindle", "publish", "small@1", "/checkpoints/small", code=6)
        assert re.search(r"\d+(\.\d+)? MiB", told)
        agent.kill()
    finally:
        subprocess.run(["umount", "-l", store], check=True)


def huge_pages_command():
    agent = pod_of(named(render(MANIFESTS / "overlays/production"), "DaemonSet", "rekindle-agent"))
    container, = [c for c in containers(agent) if c["name"] == "huge-pages"]
    return container["command"]


@pytest.mark.parametrize("before, code, words", [
    ("true", 0, "huge=within_size"),
    ("mkdir -m 0755 $S", 0, "huge=within_size"),
    ("mkdir $S; mount -t tmpfs -o huge=always none $S; touch $S/copy", 0, "huge=always"),
    ("mkdir $S; touch $S/copy", 1, "the mount would hide its copies"),
], ids=["new node", "with the directory of the kubelet", "mounted before", "with copies"])
def test_huge_pages_are_mounted_once_and_never_over_copies(before, code, words):
    script = f'S=/host/shm/rekindle; {before}; "$@" && grep " $S " /proc/mounts'
    done = subprocess.run(
        ["bwrap", *ROOT_FILES, "--tmpfs", "/host", "--dir", "/host/shm", "--cap-add", "ALL", "sh", "-c", script, "sh",
         *huge_pages_command()],
        capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


def with_stand_in(deployment, node):
    """The Pod of the example with a worker of the C library instead of vLLM, which is not here."""
    programs = node / "worker"
    programs.mkdir(parents=True)
    shutil.copy(BINARY.parent / "example_worker", programs)
    shutil.copy(BINARY.parents[1] / "src/client/librekindle.so.1", programs)
    spec = pod_of(deployment)
    spec["volumes"].append({"name": "worker", "hostPath": {"path": "/worker", "type": "Directory"}})
    container, = spec["containers"]
    container["volumeMounts"].append({"name": "worker", "mountPath": "/worker", "readOnly": True})
    container["securityContext"]["readOnlyRootFilesystem"] = True
    container["env"] += [
        {"name": "LD_LIBRARY_PATH", "value": "/worker"}, {"name": "REKINDLE_MODEL", "value": "small"},
        {"name": "REKINDLE_INSTANCE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    container.update(command=["/worker/example_worker"], args=[])
    command = container["startupProbe"]["exec"]["command"]
    command[-1] = re.sub(r" &&.*", "", command[-1], flags=re.DOTALL)
    assert "wait-ready" in command[-1]
    return deployment


@components("checkpoints")
def test_the_probe_of_an_engine_passes_when_its_weights_are_there(cluster):
    """Without a secret, and with a store that the engine may only read."""
    write_checkpoint(cluster)
    cluster.start("StatefulSet", "rekindle-coordinator").wait_until("readinessProbe")
    agent, = start_agents(cluster, "node-a")
    example = named(render(MANIFESTS / "examples/vllm"), "Deployment", "qwen3")
    cluster.objects["Deployment", "qwen3"] = with_stand_in(example, cluster.directory / "node-a")
    engine = cluster.start("Deployment", "qwen3", node="node-a")
    assert not engine.passes("startupProbe")
    agent.execute("rekindle", "publish", "small@1", "/checkpoints/small")
    engine = cluster.start("Deployment", "qwen3", 1, "node-a")
    engine.wait_until("startupProbe")
    assert "small@1" in engine.log.read_text()
