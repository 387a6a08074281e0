"""The Helm chart makes the objects of the manifests, so that what is tested of those holds for it."""
import json
import subprocess
import tomllib

import pytest
import yaml
from manifests import MANIFESTS, TOOLS, named, pod_of, render
from test_manifests import COMPONENTS, closed, with_components

CHART = MANIFESTS.parent / "helm"
VALUES = {"huge-pages": "hugePages", "cert-manager": "certManager", "etcd-tls": "etcdTls",
          "metrics-tls": "metricsTls"}
READ = {"rekindle.toml": tomllib.loads, "rights.json": json.loads}
NODES = ("--set", "rdma.nodes={10.0.0.0/16}")


def chart(*options):
    rendered = subprocess.run([TOOLS / "helm", "template", "rekindle", str(CHART), *options], capture_output=True,
                              text=True, timeout=60)
    assert rendered.returncode == 0, rendered.stderr
    return list(yaml.safe_load_all(rendered.stdout))


def comparable(objects):
    """By kind and name, without what the two tools do in their own ways: the namespace, and how a change of the
    configuration restarts Pods (another name, another annotation), and the order of volumes and variables. Files are
    compared by their meaning."""
    text = json.dumps(objects)
    for config in named(objects, "ConfigMap"):
        plain = "rekindle-rights" if "rights.json" in config["data"] else "rekindle"
        text = text.replace(f'"{config["metadata"]["name"]}"', f'"{plain}"')
    objects = json.loads(text)
    found = {}
    for o in objects:
        o["metadata"].pop("namespace", None)
        if o["kind"] == "ConfigMap":
            o["data"] = {key: READ.get(key, str)(value) for key, value in o["data"].items()}
        if "template" in o.get("spec", {}):
            o["spec"]["template"]["metadata"].pop("annotations", None)
            pod_of(o)["volumes"] = sorted(pod_of(o).get("volumes", []), key=lambda volume: volume["name"])
            for container in pod_of(o)["containers"]:
                for key in ("env", "volumeMounts"):
                    container[key] = sorted(container.get(key, []), key=lambda one: one["name"])
        found[o["kind"], o["metadata"]["name"]] = o
    return found


@pytest.mark.parametrize("components", [(), *(closed(name) for name in COMPONENTS), tuple(COMPONENTS)],
                         ids=lambda names: "+".join(names) or "base")
def test_the_chart_makes_the_objects_of_the_manifests(components, tmp_path):
    enabled = [word for name in components for word in ("--set", f"{VALUES.get(name, name)}.enabled=true")]
    of_chart = comparable(chart(*NODES, *enabled))
    of_manifests = comparable(render(with_components(tmp_path, *components)))
    assert of_chart.keys() == of_manifests.keys()
    for key, o in of_manifests.items():
        assert of_chart[key] == o, key


def test_a_changed_configuration_restarts_the_pods_of_the_chart():
    def checksums(*options):
        return [o["spec"]["template"]["metadata"]["annotations"]["checksum/config"] for o in chart(*options)
                if "annotations" in o.get("spec", {}).get("template", {}).get("metadata", {})]
    before, after = checksums(), checksums("--set", "config=[agent]")
    assert len(before) == 2
    assert not set(before) & set(after)


def test_rdma_without_the_addresses_of_the_nodes_does_not_render():
    with pytest.raises(AssertionError, match=r"rdma.enabled needs rdma.nodes, the address ranges of your nodes"):
        chart("--set", "rdma.enabled=true")


@pytest.mark.parametrize("value, needed", [("metricsTls", "metrics.enabled"), ("etcdTls", "etcd.enabled"),
                                           ("rights", "certificates.enabled")])
def test_a_value_without_what_it_needs_does_not_render(value, needed):
    with pytest.raises(AssertionError, match=f"{value}.enabled needs .*{needed}"):
        chart("--set", f"{value}.enabled=true")


def test_another_issuer_and_trust_domain_reach_the_certificates():
    objects = chart("--set", "certificates.enabled=true,certManager.enabled=true,certManager.trustDomain=example.org",
                    "--set", "certManager.issuer.name=vault,certManager.issuer.kind=ClusterIssuer")
    assert named(objects, "Issuer") == []
    uris = {c["metadata"]["name"]: c["spec"]["uris"] for c in named(objects, "Certificate")}
    assert uris == {"rekindle-coordinator": ["spiffe://example.org/rekindle/coordinator"],
                    "rekindle-agent": ["spiffe://example.org/rekindle/agent"],
                    "rekindle-client": ["spiffe://example.org/rekindle/client/kubernetes"]}
    assert {c["spec"]["issuerRef"]["name"] for c in named(objects, "Certificate")} == {"vault"}


def test_changed_rights_restart_the_coordinators_only():
    def annotations(*options):
        objects = chart("--set", "certificates.enabled=true,rights.enabled=true", *options)
        return [named(objects, kind, f"rekindle-{name}")["spec"]["template"]["metadata"]["annotations"]
                for kind, name in (("StatefulSet", "coordinator"), ("DaemonSet", "agent"))]
    before, after = annotations(), annotations("--set-json", 'rights.json="{}"')
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_values_reach_the_objects():
    objects = chart("--set", "image.repository=registry.example/rekindle,image.tag=9,secretName=other",
                    "--set", "agent.resources.requests.memory=910Gi,rdma.enabled=true,rdma.resource=rdma/own", *NODES)
    agent = pod_of(named(objects, "DaemonSet", "rekindle-agent"))
    assert agent["containers"][0]["image"] == "registry.example/rekindle:9"
    assert agent["containers"][0]["resources"] == {
        "requests": {"cpu": "1", "memory": "910Gi"}, "limits": {"rdma/own": "1"}}
    assert [v["secret"]["secretName"] for v in agent["volumes"] if "secret" in v] == ["other"]
