"""The Pods of the manifests, run on this machine with their own command lines, probes, users and mounts."""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
from cert_manager import CertManager
from manifests import BINARY, MANIFESTS, containers, named, pod_of, render
from pods import PATIENCE_S, ROOT_FILES, Cluster, can_run_pods, eventually, run
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


def certify(cluster):
    """As cert-manager would."""
    manager = CertManager(cluster.directory / "authority")
    cluster.secrets = manager.secrets(cluster.objects.values())
    return manager


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


@components("cert-manager", "certificates", "checkpoints")
def test_a_fleet_with_certificates_pulls_and_has_no_secret(cluster):
    write_checkpoint(cluster)
    manager = certify(cluster)
    assert "rekindle" not in cluster.secrets
    coordinator = cluster.start("StatefulSet", "rekindle-coordinator")
    coordinator.wait_until("readinessProbe")
    one, other = start_agents(cluster, "node-a", "node-b")
    assert all(pod.passes(probe) for pod in (coordinator, one) for probe in ("readinessProbe", "livenessProbe"))
    assert {node["node"] for node in fleet(coordinator)["nodes"]} == {"node-a", "node-b"}
    one.execute("rekindle", "publish", "small@1", "/checkpoints/small")
    assert "every byte verified" in other.execute("rekindle", "pull", "small")

    # The certificate of agents is for no command, and that of another authority for nobody.
    files = [f"--tls-{name}=/etc/rekindle/tls/{file}" for name, file in
             (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt"))]
    assert "is for the role agent" in one.execute("rekindle", "status", *files, code=7)
    strangers = CertManager(cluster.directory / "strangers")
    own = cluster.secrets["rekindle-agent-tls"]
    agent_spec = cluster.objects["Certificate", "rekindle-agent"]["spec"]
    cluster.secrets["rekindle-agent-tls"] = strangers.issue(agent_spec) | {"ca.crt": own["ca.crt"]}
    start_agents(cluster, "node-c")
    assert {node["node"] for node in fleet(coordinator)["nodes"]} == {"node-a", "node-b"}

    # A renewal needs no restart.
    for name in ("coordinator", "agent", "client"):
        spec = cluster.objects["Certificate", f"rekindle-{name}"]["spec"]
        cluster.secrets[f"rekindle-{name}-tls"] = manager.issue(spec)
    for pod, volume in ((coordinator, "tls"), (coordinator, "client-tls"), (one, "tls"), (other, "tls")):
        pod.renew(volume)
    start_agents(cluster, "node-d")
    eventually(lambda: "node-d" in {node["node"] for node in fleet(coordinator)["nodes"]}, "node-d stays outside")
    eventually(lambda: "tls.reloaded" in coordinator.log.read_text(), coordinator.tail)


def start_measured(cluster):
    """A coordinator whose metrics are for one token."""
    certify(cluster)
    cluster.secrets["rekindle-metrics"] = {"token": b"the token of a prometheus\n"}
    coordinator = cluster.start("StatefulSet", "rekindle-coordinator")
    coordinator.wait_until("readinessProbe")
    return coordinator


@components("cert-manager", "certificates", "metrics", "metrics-tls")
def test_metrics_by_https_are_for_a_token_and_for_nobody_else(cluster):
    coordinator = start_measured(cluster)
    agent, = start_agents(cluster, "node-a")
    authority = cluster.directory / "ca.crt"
    authority.write_bytes(cluster.secrets["rekindle-agent-tls"]["ca.crt"])
    for pod, name, metric in ((coordinator, "rekindle-coordinator", "rekindle_coordinator_leading 1"),
                              (agent, "rekindle-agent", "rekindle_coordinator_connected 1")):
        assert pod.listening() == ports_of(pod)
        annotations = pod.template["metadata"]["annotations"]
        port = annotations["prometheus.io/port"]
        assert annotations["prometheus.io/scheme"] == "https"
        ask = ["ip", "netns", "exec", pod.namespace, "curl", "-sS", "--cacert", authority, "--resolve",
               f"{name}:{port}:{pod.ip}", f"https://{name}:{port}/metrics"]
        token = ["-H", "Authorization: Bearer the token of a prometheus"]
        eventually(lambda: metric in run(*ask, *token), f"{metric} is not in the metrics of {name}")
        assert "--http-token-file" in run(*ask)
        assert "https" in run("ip", "netns", "exec", pod.namespace, "curl", "-sS", *token,
                              f"http://{pod.ip}:{port}/metrics")


# Holds more connections than a server accepts, and says nothing on any of them.
CROWD = """
import select, socket, sys, time
connect = lambda: socket.create_connection((sys.argv[1], int(sys.argv[2])))
held = [connect() for _ in range(80)]
print("here", flush=True)
while True:
    for ended in select.select(held, [], [])[0]:
        ended.close()
        held[held.index(ended)] = connect()
    time.sleep(0.05)
"""


@components("cert-manager", "certificates", "metrics", "metrics-tls")
def test_a_host_that_holds_connections_keeps_no_other_host_from_the_metrics(cluster):
    coordinator = start_measured(cluster)
    other, = start_agents(cluster, "node-a")
    with subprocess.Popen(["ip", "netns", "exec", other.namespace, sys.executable, "-c", CROWD, coordinator.ip, "7302"],
                          stdout=subprocess.PIPE, text=True) as crowd:
        try:
            assert crowd.stdout.readline() == "here\n"
            for _ in range(20):
                assert run("ip", "netns", "exec", coordinator.namespace, "curl", "-sSk",
                           f"https://{coordinator.ip}:7302/healthz") == "ok\n"
        finally:
            crowd.kill()


@components("audit", "cert-manager", "certificates", "checkpoints", "rights")
def test_rights_and_the_audit_log_are_those_of_the_manifests(cluster):
    write_checkpoint(cluster)
    certify(cluster)
    coordinator = cluster.start("StatefulSet", "rekindle-coordinator")
    coordinator.wait_until("readinessProbe")
    one, other = start_agents(cluster, "node-a", "node-b")
    eventually(lambda: len(fleet(coordinator)["nodes"]) == 2, "an agent may not register")
    one.execute("rekindle", "publish", "small@1", "/checkpoints/small")
    assert "every byte verified" in other.execute("rekindle", "pull", "small")
    assert "gets no new readers" in coordinator.execute("rekindle", "drain", "node-b")
    # The commands of the coordinator's Pods may not publish.
    operator = "spiffe://rekindle.local/rekindle/client/kubernetes"
    assert "publish" in coordinator.execute("rekindle", "auth", "check", operator, "publish", "small", code=7)
    audit = cluster.directory / "claims/rekindle-audit/rekindle-coordinator-0.jsonl"
    acts = [json.loads(line) for line in audit.read_text().splitlines()]
    assert ("drain", "node-b") in {(act["act"], act.get("object")) for act in acts}
    run(BINARY, "audit", "verify", audit)


@components("checkpoints", "publishers")
def test_only_versions_of_the_publisher_in_the_config_map_are_taken(cluster):
    write_checkpoint(cluster)
    checkpoints = cluster.directory / "claims/checkpoints"
    for name in ("trainer", "stranger"):
        run(BINARY, "keys", "new", checkpoints / name)
    key = (checkpoints / "trainer.pub").read_text()
    cluster.objects["ConfigMap", "rekindle-publishers"] = {"data": {"publisher.pub": key}}
    cluster.start("StatefulSet", "rekindle-coordinator").wait_until("readinessProbe")
    agent, = start_agents(cluster, "node-a")
    eventually(lambda: "node-a" in agent.asked("rekindle", "status"), "the agent has not registered")
    publish = ["rekindle", "publish", "small@1", "/checkpoints/small"]
    agent.execute(*publish, code=7)
    agent.execute(*publish, "--sign-key=/checkpoints/stranger", code=7)
    agent.execute(*publish, "--sign-key=/checkpoints/trainer")
    assert "small@1" in agent.execute("rekindle", "status")


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


@components("cert-manager", "certificates", "checkpoints", "etcd", "etcd-tls")
def test_etcd_with_tls_serves_coordinators_and_nobody_without_a_certificate(cluster):
    write_checkpoint(cluster)
    certify(cluster)
    members = [cluster.start("StatefulSet", "rekindle-etcd", n) for n in range(3)]
    for member in members:
        member.wait_until("readinessProbe")
        assert member.listening() == ports_of(member)
    coordinators = [cluster.start("StatefulSet", "rekindle-coordinator", n) for n in range(3)]
    agent, = start_agents(cluster, "node-a")
    eventually(lambda: any(pod.asked("rekindle", "status") for pod in coordinators), coordinators[0].tail)
    leader, = [pod for pod in coordinators if pod.listening()]
    eventually(lambda: "node-a" in leader.asked("rekindle", "status"), agent.tail)
    agent.execute("rekindle", "publish", "small@1", "/checkpoints/small")
    leader.kill()
    left = [pod for pod in coordinators if pod is not leader]
    eventually(lambda: any("small@1" in pod.asked("rekindle", "status") for pod in left), "nobody leads")
    for file, data in cluster.secrets["rekindle-etcd-client-tls"].items():
        (cluster.directory / file).write_bytes(data)
    ask = ["ip", "netns", "exec", agent.namespace, "curl", "-sSk", f"https://{members[0].ip}:2379/version"]
    assert "etcdserver" in run(*ask, "--cert", cluster.directory / "tls.crt", "--key", cluster.directory / "tls.key")
    assert subprocess.run(ask, capture_output=True, timeout=PATIENCE_S).returncode != 0


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
