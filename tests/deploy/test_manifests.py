"""The manifests in tools/deploy/kubernetes, rendered by kubectl: Kubernetes' schemas and what the parts say of each
other. A list of mistakes shows that each is found."""
import copy
import json
import os
import pathlib
import re
import subprocess

import pytest
import yaml
from manifests import (BINARY, MANIFESTS, ROOT, complaints, containers, help_of, named, pod_of, render, schema_errors)
from pods import run

COMPONENTS = sorted(path.name for path in (MANIFESTS / "components").iterdir())
# What a component cannot be without.
NEEDS = {"etcd-tls": ["cert-manager", "certificates", "etcd"], "metrics-tls": ["certificates", "metrics"],
         "rights": ["certificates"]}
EXAMPLE = MANIFESTS / "examples/vllm"
# What a user must write into a directory that has the component rdma.
NODES = """patches:
  - target: {kind: NetworkPolicy, name: rekindle-coordinator}
    patch: |-
      - {op: replace, path: /spec/ingress/0/from/0/ipBlock/cidr, value: 10.0.0.0/16}
"""


def closed(component):
    """A component and those that it needs, in the order of their directories."""
    return tuple(sorted([component, *NEEDS.get(component, [])]))


def directory_of(directory, base, *components):
    """A user's own directory: a base with some components."""
    lines = ["apiVersion: kustomize.config.k8s.io/v1beta1", "kind: Kustomization", "resources:",
             f"  - {os.path.relpath(base, directory)}", "components:"]
    lines += [f"  - {os.path.relpath(component, directory)}" for component in components]
    (directory / "kustomization.yaml").write_text("\n".join(lines) + "\n")
    return directory


def with_components(directory, *components):
    directory_of(directory, MANIFESTS / "base", *(MANIFESTS / "components" / name for name in components))
    if "rdma" in components:
        with (directory / "kustomization.yaml").open("a") as file:
            file.write(NODES)
    return directory


@pytest.mark.parametrize("directory", ["base", "examples/vllm"])
def test_the_manifests_fit_the_schemas_and_each_other(directory):
    assert complaints(render(MANIFESTS / directory)) == []


def test_all_components_together_lack_only_the_addresses_of_the_nodes(tmp_path):
    production = MANIFESTS / "overlays/production"
    wrong, = complaints(render(production))
    assert wrong.endswith("its NetworkPolicy needs the address range of your nodes, not ADDRESS-RANGE-OF-YOUR-NODES")
    assert NODES in (ROOT / "docs/guides/kubernetes.md").read_text()
    text = directory_of(tmp_path, production) / "kustomization.yaml"
    text.write_text(text.read_text().replace("components:\n", NODES))
    assert complaints(render(tmp_path)) == []


def test_the_example_shares_namespaces_of_the_node_only_with_its_component(tmp_path):
    plain = render(EXAMPLE)
    shared = render(directory_of(tmp_path, EXAMPLE, EXAMPLE / "cuda-ipc"))
    assert complaints(shared) == []
    for objects, there in ((plain, False), (shared, True)):
        pod = pod_of(named(objects, "Deployment", "qwen3"))
        assert [pod.get(name, False) for name in ("hostIPC", "hostPID", "hostNetwork")] == [there, there, False]


@pytest.mark.parametrize("directory", ["base", "examples/vllm"])
def test_the_namespace_that_a_user_applies_first_is_that_of_the_objects(directory):
    namespace, = yaml.safe_load_all((MANIFESTS / directory / "namespace.yaml").read_text())
    assert list(schema_errors([namespace])) == []
    assert {o["metadata"]["namespace"] for o in render(MANIFESTS / directory)} == {namespace["metadata"]["name"]}


def test_an_upgrade_of_several_coordinators_waits_for_each(tmp_path):
    coordinators = named(render(with_components(tmp_path, "etcd")), "StatefulSet", "rekindle-coordinator")
    lease_s = int(re.search(r"--etcd-ttl.*?\[(\d+)s\]", help_of("coordinator"), re.DOTALL)[1])
    assert coordinators["spec"]["minReadySeconds"] > 2 * lease_s


@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_works_with_those_that_it_needs(component, tmp_path):
    assert complaints(render(with_components(tmp_path, *closed(component)))) == []


def test_a_changed_value_in_the_file_renames_the_configuration_so_that_pods_restart(tmp_path):
    (tmp_path / "rekindle.toml").write_text('[coordinator]\n[agent]\nbudget = "4GiB"\nreserve = "0"\n')
    directory = with_components(tmp_path)
    with (directory / "kustomization.yaml").open("a") as file:
        file.write("configMapGenerator:\n  - name: rekindle\n    behavior: merge\n    files: [rekindle.toml]\n")
    text = (directory / "kustomization.yaml").read_text()
    (directory / "kustomization.yaml").write_text(text.replace("components:\nconfig", "config"))
    changed, plain = render(directory), render(MANIFESTS / "base")
    assert complaints(changed) == []
    names = [named(objects, "ConfigMap")[0]["metadata"]["name"] for objects in (changed, plain)]
    assert names[0] != names[1]
    assert names[0] in json.dumps(pod_of(named(changed, "DaemonSet")[0]))


def agent(objects):
    return pod_of(named(objects, "DaemonSet", "rekindle-agent"))


def coordinator(objects):
    return pod_of(named(objects, "StatefulSet", "rekindle-coordinator"))


def replace(words, old, new):
    words[:] = [word.replace(old, new) for word in words]


# Each: what it breaks, and words of the complaint.
MISTAKES = {
    "a field that Kubernetes does not know": (
        lambda o: agent(o)["containers"][0].update(volumeMount=[]), "volumeMount"),
    "a number as a label": (lambda o: agent(o)["nodeSelector"].update({"rekindle/agent": True}), "schema"),
    "no such option": (
        lambda o: agent(o)["containers"][0]["args"].append("--gpus=all"), "rekindle agent has no option --gpus"),
    "no such option in a probe": (
        lambda o: replace(agent(o)["containers"][0]["readinessProbe"]["exec"]["command"], "--agent", "--agents"),
        "rekindle status has no option --agents"),
    "no such command": (
        lambda o: replace(agent(o)["containers"][0]["livenessProbe"]["exec"]["command"], "status", "ping"),
        "no command rekindle ping"),
    "a variable that is not set": (
        lambda o: agent(o)["containers"][0]["env"].pop(0), "POD_IP is not set"),
    "a variable in a probe without a shell": (
        lambda o: agent(o)["containers"][0]["startupProbe"]["exec"]["command"].append("$(NODE_NAME)"),
        "a probe without a shell"),
    "a misspelled variable": (
        lambda o: coordinator(o)["containers"][0]["env"][1].update(name="REKINDLE_SECRET"), "nothing reads"),
    "another port in the policy": (
        lambda o: named(o, "NetworkPolicy", "rekindle-agent")["spec"]["ingress"][0]["ports"].pop(),
        "admits [7400], its ports are [7400, 7401]"),
    "another port of the daemon": (
        lambda o: replace(coordinator(o)["containers"][0]["args"], "7300", "7301"), "it listens on [7301]"),
    "a Service with another target": (
        lambda o: named(o, "Service", "rekindle-coordinator")["spec"]["ports"][0].update(targetPort="http"),
        "no container port http"),
    "a Service that finds nothing": (
        lambda o: named(o, "Service", "rekindle-coordinator")["spec"]["selector"].update(extra="x"),
        "finds 0 workloads"),
    "a StatefulSet with another Service": (
        lambda o: named(o, "StatefulSet")[0]["spec"].update(serviceName="rekindle-coordinator"), "no headless Service"),
    "a selector that is not the template's": (
        lambda o: named(o, "DaemonSet")[0]["spec"]["selector"]["matchLabels"].update(a="b"), "its own Pods"),
    "a budget for no Pods": (
        lambda o: named(o, "PodDisruptionBudget")[0]["spec"]["selector"]["matchLabels"].update(a="b"),
        "finds no workload"),
    "another address of the coordinator": (
        lambda o: named(o, "ConfigMap")[0]["data"].update(coordinator="rekindle-coordinater:7300"),
        "no Service has this name"),
    "a secret that everybody may read": (
        lambda o: next(v for v in agent(o)["volumes"] if v["name"] == "secret")["secret"].update(defaultMode=0o444),
        "rekindle refuses"),
    "a secret that a group may write": (
        lambda o: next(v for v in agent(o)["volumes"] if v["name"] == "secret")["secret"].update(defaultMode=0o460),
        "rekindle refuses"),
    "a secret of root for another user": (
        lambda o: coordinator(o)["securityContext"].pop("fsGroup"), "its user cannot read it"),
    "a secret that may be missing": (
        lambda o: next(v for v in agent(o)["volumes"] if v["name"] == "secret")["secret"].update(optional=True),
        "does not require the Secret"),
    "a volume that is not there": (
        lambda o: agent(o)["containers"][0]["volumeMounts"][0].update(name="conf"), "no volume conf"),
    "less memory than the budget": (
        lambda o: agent(o)["containers"][0]["resources"]["requests"].update(memory="8Gi"),
        "it requests 8 GiB of memory for a budget of 8GiB"),
    "no memory at all": (
        lambda o: agent(o)["containers"][0]["resources"]["requests"].pop("memory"), "requests no CPU or no memory"),
    "a limit of memory": (
        lambda o: agent(o)["containers"][0]["resources"].update(limits={"memory": "10Gi"}), "limit of memory"),
    "another store": (
        lambda o: next(v for v in agent(o)["volumes"] if v["name"] == "store")["hostPath"].update(path="/dev/shm/r"),
        "several paths of the store"),
    "an image without a tag": (lambda o: containers(agent(o))[0].update(image="rekindle"), "no fixed tag"),
    "an image of another version": (lambda o: containers(agent(o))[0].update(image="rekindle:0.0.9"), "this is"),
    "more rights": (
        lambda o: agent(o)["containers"][0]["securityContext"].update(privileged=True), "agent is privileged"),
    "rights that are not dropped": (
        lambda o: agent(o)["containers"][0]["securityContext"].pop("capabilities"), "keeps rights"),
    "a token": (lambda o: coordinator(o).pop("automountServiceAccountToken"), "token"),
    "the namespace among the objects": (
        lambda o: o.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rekindle"}}), "delete -k"),
    "a policy for every address": (
        lambda o: named(o, "NetworkPolicy", "rekindle-agent")["spec"]["ingress"][0].pop("from"),
        "admits every address"),
    "no priority": (lambda o: agent(o).pop("priorityClassName"), "engines may take its place"),
    "another namespace": (lambda o: named(o, "DaemonSet")[0]["metadata"].update(namespace="default"), "namespace"),
    "agents on other nodes": (lambda o: agent(o).update(nodeSelector={"a": "b"}), "same nodes"),
}
MISTAKES_OF_COMPONENTS = {
    "a third coordinator that nobody names": (
        "etcd", lambda o: named(o, "StatefulSet", "rekindle-coordinator")["spec"].update(replicas=4), "the addresses"),
    "one address for several coordinators": (
        "etcd", lambda o: named(o, "ConfigMap")[0]["data"].update(coordinator="rekindle-coordinator-pods:7300"),
        "not the address of one Pod"),
    "another port of etcd": (
        "etcd", lambda o: replace(coordinator(o)["containers"][0]["args"], "2379", "2378"), "no Service has this name"),
    "etcd's plain address for members with TLS": (
        "etcd-tls", lambda o: replace(coordinator(o)["containers"][0]["args"], "https://", "http://"),
        "not all of etcd is https"),
    "a Secret that nobody makes": (
        "etcd-tls", lambda o: o.remove(named(o, "Certificate", "rekindle-coordinator")),
        "no Certificate makes rekindle-coordinator-tls"),
    "a certificate without its issuer": (
        "cert-manager", lambda o: o.remove(named(o, "Issuer", "rekindle")), "no Issuer rekindle"),
    "a certificate for servers only": (
        "cert-manager", lambda o: named(o, "Certificate", "rekindle-agent")["spec"]["usages"].remove("client auth"),
        "daemons are servers and clients"),
    "a misspelled field of a certificate": (
        "cert-manager", lambda o: named(o, "Certificate", "rekindle-agent")["spec"].update(dnsName=["x"]),
        "no field dnsName"),
    "the certificate of another role": (
        "certificates", lambda o: next(v for v in agent(o)["volumes"] if v["name"] == "tls")["secret"].update(
            secretName="rekindle-coordinator-tls"), "does not require the Secret `rekindle-agent-tls`"),
    "a key that everybody may read": (
        "certificates", lambda o: next(v for v in coordinator(o)["volumes"] if v["name"] == "tls")["secret"].update(
            defaultMode=0o444), "rekindle refuses /etc/rekindle/tls/tls.key"),
    "a certificate that would not follow its renewal": (
        "certificates", lambda o: next(
            m for m in agent(o)["containers"][0]["volumeMounts"] if m["name"] == "tls").update(subPath="x"),
        "would not follow a renewal"),
    "neither a secret nor a certificate": (
        "certificates", lambda o: replace(agent(o)["containers"][0]["args"], "--tls-key=", "--tls-crl="),
        "a secret or a certificate"),
    "metrics for everybody beside their token": (
        "metrics-tls", lambda o: agent(o)["containers"][0]["env"].append(
            {"name": "REKINDLE_AGENT_HTTP_OPEN", "value": "true"}), "everybody may read"),
    "https metrics that Prometheus asks by http": (
        "metrics-tls", lambda o: named(o, "DaemonSet")[0]["spec"]["template"]["metadata"]["annotations"].pop(
            "prometheus.io/scheme"), "the annotation prometheus.io/scheme"),
    "agents that the policy keeps out": (
        "rdma", lambda o: named(o, "NetworkPolicy")[0]["spec"]["ingress"][0].update(
            {"from": [{"podSelector": {"matchLabels": {"a": "b"}}}]}), "keeps out agents"),
    "huge pages elsewhere": (
        "huge-pages", lambda o: replace(agent(o)["initContainers"][0]["command"], "/rekindle\n", "/other\n"),
        "huge pages are mounted elsewhere"),
    "an agent that waits for a keeper that is not there": (
        "gpu", lambda o: agent(o)["containers"].pop(), "0 containers are keepers"),
    "a keeper that the agent does not wait for": (
        "gpu", lambda o: agent(o)["containers"][0]["args"].remove("--external-keeper"), "1 containers are keepers"),
    "a keeper of another store": (
        "gpu", lambda o: replace(agent(o)["containers"][1]["args"], "/rekindle/", "/other/"),
        "keeper is no keeper of this store"),
}


@pytest.fixture(scope="module")
def base():
    return render(MANIFESTS / "base")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, base):
    objects = copy.deepcopy(base)
    break_it, words = MISTAKES[mistake]
    break_it(objects)
    assert words in "\n".join(complaints(objects))


@pytest.mark.parametrize("mistake", MISTAKES_OF_COMPONENTS)
def test_a_mistake_in_a_component_is_found(mistake, tmp_path):
    component, break_it, words = MISTAKES_OF_COMPONENTS[mistake]
    objects = render(with_components(tmp_path, *closed(component)))
    break_it(objects)
    assert words in "\n".join(complaints(objects))


def test_the_example_asks_for_the_model_and_the_instance_that_its_probe_waits_for():
    container, = pod_of(named(render(EXAMPLE), "Deployment", "qwen3"))["containers"]
    prefix = "--model-loader-extra-config="
    config, = [json.loads(word.removeprefix(prefix)) for word in container["args"] if word.startswith(prefix)]
    assert config == {"model": "qwen3", "instance": "$(POD_NAME)"}
    assert 'rekindle wait-ready "$POD_NAME" ' in container["startupProbe"]["exec"]["command"][-1]


@pytest.mark.skipif('VERSION_ID="12"' not in pathlib.Path("/etc/os-release").read_text(),
                    reason="the packages of the image are those of Debian 12, where its binary is built")
def test_the_image_has_every_library_that_the_command_needs():
    dockerfile = (MANIFESTS.parent / "container/Dockerfile").read_text()
    installed = set(re.findall(r"^ +([a-z0-9.+-]+) \\$", dockerfile, re.MULTILINE))
    linked = [pathlib.Path(path).resolve() for path in re.findall(r"=> (/\S+)", run("ldd", BINARY))]
    # A pattern, because packages name files in /lib, and the linker in /usr/lib.
    owners = {run("dpkg", "-S", f"*/{path.parent.name}/{path.name}").split(":")[0] for path in linked}
    in_every_image = {"libc6", "libgcc-s1", "libstdc++6", "zlib1g"}
    with_libibverbs = {"libnl-3-200", "libnl-route-3-200"}
    assert "libprotobuf32" in owners
    assert owners - in_every_image - with_libibverbs <= installed


def last_command_of_the_image():
    text, = re.findall(r"^RUN (ldconfig .*?)\nENTRYPOINT", (MANIFESTS.parent / "container/Dockerfile").read_text(),
                       re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.parametrize("gpu, features, libraries, words", [
    ("no", "CUDA off, NCCL off", "", None),
    ("yes", "CUDA on, NCCL on", "libnccl.so.2 (libc6,x86-64) => /usr/local/lib/libnccl.so.2", None),
    ("yes", "CUDA off, NCCL off", "", "no CUDA or no NCCL"),
    ("yes", "CUDA on, NCCL off", "", "no CUDA or no NCCL"),
    ("yes", "CUDA on, NCCL on", "", "no libnccl.so.2"),
], ids=["plain", "with both", "no toolkit", "no header of NCCL", "no library"])
def test_an_image_for_gpus_is_not_built_without_their_libraries(gpu, features, libraries, words, tmp_path):
    assert re.search(r"CUDA o(n|ff), NCCL o(n|ff)", run(BINARY, "version"))
    for name, line in (("rekindle", f"  g++, Release; verbs on, {features}; digests"), ("ldconfig", libraries)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{line}'\n")
        (tmp_path / name).chmod(0o755)
    built = subprocess.run(["sh", "-c", last_command_of_the_image()], capture_output=True, text=True,
                           env={"PATH": f"{tmp_path}:/usr/bin:/bin", "GPU": gpu})
    assert (built.returncode == 0) == (words is None)
    assert (words or "") in built.stderr
