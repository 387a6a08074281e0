"""Renders the manifests, and finds what Kubernetes would accept but what could not work."""
import functools
import ipaddress
import os
import pathlib
import re
import subprocess
import tomllib

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "tools/deploy/kubernetes"
BINARY = pathlib.Path(os.environ.get("REKINDLE_BINARY", ROOT / "build/dev/bin/rekindle"))
TOOLS = ROOT / "build/deploy-venv/bin"
# The oldest version whose schemas must accept the manifests, and the newest that kubernetes-validate knows.
SCHEMAS = ("1.28", kubernetes_validate.latest_version())
WORKLOADS = ("StatefulSet", "DaemonSet", "Deployment")
# Beside the store, an agent needs memory for itself: bounce buffers, tables, and what it digests.
AGENT_OWN_BYTES = 2 << 30


def render(directory):
    """The objects that `kubectl kustomize` makes of a directory."""
    rendered = subprocess.run([TOOLS / "kubectl", "kustomize", str(directory)], capture_output=True, text=True,
                              timeout=60)
    assert rendered.returncode == 0, rendered.stderr
    return list(yaml.safe_load_all(rendered.stdout))


def named(objects, kind, name=None):
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert name is None or len(found) == 1, f"{len(found)} objects {kind}/{name}"
    return found[0] if name else found


def version():
    return re.search(r"project\(rekindle VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


@functools.cache
def help_of(command):
    asked = subprocess.run([BINARY, command, "--help"], capture_output=True, text=True, timeout=20)
    return asked.stdout if f"Usage: rekindle {command}" in asked.stdout else ""


def size(text):
    """Bytes of a quantity of Kubernetes or of a size of Rekindle, in the powers of two that the manifests use."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?B?", text).groups()
    return int(number) << (10 * " KMGT".index((unit or " ")[0]))


def template_of(workload):
    return workload["spec"]["template"]


def pod_of(workload):
    return template_of(workload)["spec"]


def containers(pod):
    return [*pod.get("initContainers", []), *pod["containers"]]


def selects(selector, workload):
    return selector.items() <= template_of(workload)["metadata"]["labels"].items()


def complaints(objects):
    """What is wrong, one line each, by the name of the object."""
    workloads = [o for o in objects if o["kind"] in WORKLOADS]
    found = []
    for check in (schema_errors, wrong_references, wrong_hosts, wrong_certificates):
        found += check(objects)
    for workload in workloads:
        for check in (wrong_images, wrong_selectors, wrong_volumes, wrong_commands, wrong_ports, loose_rights,
                      wrong_secrets, wrong_schemes, wrong_memory, wrong_stores):
            found += [f"{workload['metadata']['name']}: {what}" for what in check(workload, objects)]
    return found


def of_cert_manager(o):
    return o["apiVersion"].startswith("cert-manager.io/")


def schema_errors(objects):
    """kubernetes-validate has the schemas of Kubernetes only: wrong_certificates() looks at cert-manager's objects."""
    for version_ in SCHEMAS:
        for o in objects:
            if of_cert_manager(o):
                continue
            try:
                kubernetes_validate.validate(o, version_, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{o['metadata']['name']}: schema {version_}: {list(error.path)}: {error.message}"


def wrong_references(objects):
    workloads = [o for o in objects if o["kind"] in WORKLOADS]
    for o in objects:
        if o["kind"] == "Service":
            behind = [w for w in workloads if selects(o["spec"]["selector"], w)]
            ports = {p["name"] for w in behind for c in pod_of(w)["containers"] for p in c.get("ports", [])}
            if len(behind) != 1:
                yield f"{o['metadata']['name']}: its selector finds {len(behind)} workloads"
            yield from (f"{o['metadata']['name']}: no container port {p['targetPort']}"
                        for p in o["spec"]["ports"] if p["targetPort"] not in ports)
        elif o["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            selector = o["spec"]["selector" if o["kind"] == "PodDisruptionBudget" else "podSelector"]["matchLabels"]
            if not any(selects(selector, w) for w in workloads):
                yield f"{o['kind']} {o['metadata']['name']}: its selector finds no workload"
        elif o["kind"] == "StatefulSet":
            service = [s for s in named(objects, "Service") if s["metadata"]["name"] == o["spec"]["serviceName"]]
            if not service or service[0]["spec"].get("clusterIP") != "None" or \
                    not selects(service[0]["spec"]["selector"], o):
                yield f"{o['metadata']['name']}: {o['spec']['serviceName']} is no headless Service of its Pods"
        # Whoever may use the namespace of the agents can read the secret, so engines have another.
        namespace = "vllm" if any(w["kind"] == "Deployment" for w in workloads) else "rekindle"
        if o["metadata"].get("namespace") != namespace:
            yield f"{o['metadata']['name']}: namespace {o['metadata'].get('namespace')}"
        if o["kind"] == "Namespace":
            yield f"{o['metadata']['name']}: `kubectl delete -k` would delete all that a user keeps in it"


# Of cert-manager.io/v1, as far as the manifests use it.
CERTIFICATE_FIELDS = {"commonName", "dnsNames", "duration", "ipAddresses", "isCA", "issuerRef", "privateKey",
                      "renewBefore", "secretName", "uris", "usages"}
ISSUER_FIELDS = {"ca", "selfSigned"}


def wrong_certificates(objects):
    """Secrets that are mounted and not made, issuers that are not there, and names that a daemon would not accept."""
    issuers = {o["metadata"]["name"]: o["spec"] for o in named(objects, "Issuer")}
    certificates = {o["metadata"]["name"]: o["spec"] for o in named(objects, "Certificate")}
    made = {spec["secretName"] for spec in certificates.values()}
    for name, spec in issuers.items():
        yield from (f"Issuer {name}: no field {field}" for field in spec.keys() - ISSUER_FIELDS)
        if "ca" in spec and spec["ca"]["secretName"] not in made:
            yield f"Issuer {name}: no Certificate makes {spec['ca']['secretName']}"
    for name, spec in certificates.items():
        yield from (f"Certificate {name}: no field {field}" for field in spec.keys() - CERTIFICATE_FIELDS)
        if spec["issuerRef"]["name"] not in issuers:
            yield f"Certificate {name}: no Issuer {spec['issuerRef']['name']}"
        if not spec.get("isCA") and not {"server auth", "client auth"} <= set(spec["usages"]):
            yield f"Certificate {name}: daemons are servers and clients"
        if any(not uri.startswith("spiffe://rekindle.local/rekindle/") for uri in spec.get("uris", [])):
            yield f"Certificate {name}: its URI is of no role"
        if not spec.get("isCA") and "rekindle-etcd" in name and not any(
                o["metadata"]["name"] == "rekindle-etcd" for o in named(objects, "StatefulSet")):
            yield f"Certificate {name}: there is no etcd"
    if certificates:
        yield from (f"{workload['metadata']['name']}: no Certificate makes {volume['secret']['secretName']}"
                    for workload in objects if workload["kind"] in WORKLOADS
                    for volume in pod_of(workload).get("volumes", [])
                    if volume.get("secret", {}).get("secretName", "").endswith("-tls")
                    and volume["secret"]["secretName"] not in made)


def wrong_hosts(objects):
    """Host names that no Service gives, ports that it does not have, members of a set that nobody names."""
    texts = [config["data"]["coordinator"] for config in named(objects, "ConfigMap") if "coordinator" in config["data"]]
    texts += [word for o in objects if o["kind"] in WORKLOADS for c in pod_of(o)["containers"]
              for word in c.get("args", []) if re.search("https?://", word)]
    services = {s["metadata"]["name"]: s["spec"] for s in named(objects, "Service")}
    sets = {s["spec"]["serviceName"]: s for s in named(objects, "StatefulSet")}
    for text in texts:
        members = {}
        for host, port in re.findall(r"(?<![\w.-])(rekindle[\w.-]*|\$\(POD_NAME\)[\w.-]*):(\d+)", text):
            name, _, service = host.rpartition(".")
            if service not in services or int(port) not in {p["port"] for p in services[service]["ports"]}:
                yield f"{host}:{port}: no Service has this name and port"
            elif name.startswith("$"):
                continue
            elif name:
                members.setdefault(service, set()).add(name)
            elif services[service].get("clusterIP") == "None" or sets and any(
                    selects(services[service]["selector"], s) and s["spec"]["replicas"] > 1 for s in sets.values()):
                yield f"{host}:{port}: not the address of one Pod"
        for service, names in members.items():
            wanted = {f"{sets[service]['metadata']['name']}-{n}" for n in range(sets[service]["spec"]["replicas"])}
            if names != wanted:
                yield f"{service}: the addresses name {sorted(names)}, not {sorted(wanted)}"


def wrong_images(workload, objects):
    for container in containers(pod_of(workload)):
        name, _, tag = container["image"].rpartition(":")
        if not name or tag == "latest":
            yield f"image {container['image']} has no fixed tag"
        elif "rekindle" in name and tag != version():
            yield f"image {container['image']}: this is {version()}"


def wrong_selectors(workload, objects):
    if not selects(workload["spec"]["selector"]["matchLabels"], workload):
        yield "its selector does not find its own Pods"
    agents = [pod_of(o) for o in named(objects, "DaemonSet")]
    if workload["kind"] == "Deployment" and not pod_of(workload)["nodeSelector"].items() >= {
            "rekindle/agent": "true"}.items() or any(a["nodeSelector"] != {"rekindle/agent": "true"} for a in agents):
        yield "agents and engines do not run on the same nodes"


def wrong_volumes(workload, objects):
    pod = pod_of(workload)
    claims = [claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])]
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    mounted = {mount["name"] for c in containers(pod) for mount in c.get("volumeMounts", [])}
    yield from (f"no volume {name}" for name in mounted - {*claims, *volumes})
    yield from (f"nothing mounts the volume {name}" for name in {*claims, *volumes} - mounted)
    configs = {config["metadata"]["name"]: config["data"] for config in named(objects, "ConfigMap")}
    for volume in volumes.values():
        # A user makes that of the publishers.
        if "configMap" in volume and volume["configMap"]["name"] not in {*configs, "rekindle-publishers"}:
            yield f"no ConfigMap {volume['configMap']['name']}"
    for container in containers(pod):
        for reference in (e["valueFrom"]["configMapKeyRef"] for e in container.get("env", [])
                          if "configMapKeyRef" in e.get("valueFrom", {})):
            if reference["key"] not in configs.get(reference["name"], {}):
                yield f"no key {reference['key']} in a ConfigMap {reference['name']}"


def commands_of(container):
    """Every command line of a container: its own, and those of its probes and hooks."""
    yield [*container.get("command", []), *container.get("args", [])]
    for place in ("startupProbe", "readinessProbe", "livenessProbe"):
        if "exec" in container.get(place, {}):
            yield container[place]["exec"]["command"]


def wrong_commands(workload, objects):
    """Commands and options of `rekindle` that do not exist, and variables that nobody sets or reads."""
    for container in containers(pod_of(workload)):
        environment = {variable["name"] for variable in container.get("env", [])}
        lines = list(commands_of(container))
        for line in lines:
            text = " ".join(line)
            for command, rest in re.findall(r"(?:^|\s)rekindle ([a-z-]+)([^&|;]*)", text):
                known = help_of(command)
                if not known:
                    yield f"no command rekindle {command}"
                yield from (f"rekindle {command} has no option {option}" for option in re.findall(r"--[a-z-]+", rest)
                            if not re.search(rf"(?<![\w-]){option}(?![\w-])", known))
            yield from (f"{name} is not set" for name in re.findall(r"\$\((\w+)\)", text) if name not in environment)
        for probe in lines[1:]:
            if "$(" in " ".join(probe) or "$" in " ".join(probe) and probe[0] != "sh":
                yield f"a probe without a shell does not replace variables: {' '.join(probe)}"
        yield from (f"nothing reads {name}" for name in environment if name.startswith("REKINDLE_") and
                    not is_variable(name))


def is_variable(name):
    """Of a shared option by its name in the help, of a daemon's option by the option."""
    for daemon in ("coordinator", "agent"):
        prefix = f"REKINDLE_{daemon.upper()}_"
        if name.startswith(prefix):
            option = "--" + name.removeprefix(prefix).lower().replace("_", "-")
            return re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(daemon)) is not None
    return name in re.findall(r"REKINDLE_[A-Z_]+", help_of("agent"))


def wrong_ports(workload, objects):
    """Ports on which the daemons listen are those of the container, and those that a NetworkPolicy admits."""
    pod = pod_of(workload)
    container, *others = pod["containers"]
    yield from (f"{other['name']} has ports" for other in others if other.get("ports"))
    declared = {port["containerPort"] for port in container.get("ports", [])}
    listening = {int(port) for word in container["args"]
                 for port in re.findall(r"^--(?:(?:[a-z]+-)*listen|metrics)\S*?[=:]\S*?:(\d+)$|^--port=(\d+)$", word)
                 for port in port if port}
    if listening != declared:
        yield f"it listens on {sorted(listening)}, its ports are {sorted(declared)}"
    policies = [p["spec"] for p in named(objects, "NetworkPolicy") if selects(p["spec"]["podSelector"]["matchLabels"],
                                                                              workload)]
    if workload["kind"] == "Deployment":
        return
    admitted = {port["port"] for policy in policies for rule in policy["ingress"] for port in rule["ports"]}
    # The kubelet needs no NetworkPolicy.
    declared -= {port["containerPort"] for port in container.get("ports", []) if port["name"] == "probe"}
    on_node = {w["metadata"]["name"] for w in objects if w["kind"] in WORKLOADS and pod_of(w).get("hostNetwork")}
    if workload["metadata"]["name"] in on_node:
        if policies:
            yield "a NetworkPolicy does nothing for a Pod on the network of its node"
    elif admitted != declared:
        yield f"a NetworkPolicy admits {sorted(admitted)}, its ports are {sorted(declared)}"
    rules = [rule for policy in policies for rule in policy["ingress"]]
    if any("from" not in rule for rule in rules):
        yield "a NetworkPolicy admits every address"
    if "rekindle-agent" in on_node and "coordinator" in workload["metadata"]["name"]:
        yield from wrong_nodes([peer["ipBlock"]["cidr"] for rule in rules for peer in rule.get("from", [])
                                if "ipBlock" in peer])


def wrong_nodes(ranges):
    if not ranges:
        yield "a NetworkPolicy by labels keeps out agents on the network of their nodes"
    for range_ in ranges:
        try:
            ipaddress.ip_network(range_)
        except ValueError:
            yield f"its NetworkPolicy needs the address range of your nodes, not {range_}"


def loose_rights(workload, objects):
    pod = pod_of(workload)
    if workload["kind"] != "Deployment" and pod.get("priorityClassName") not in (
            "system-node-critical", "system-cluster-critical"):
        yield "engines may take its place on a node"
    if pod.get("automountServiceAccountToken") is not False or pod.get("enableServiceLinks") is not False:
        yield "it gets a token of the API, or variables of Services"
    if pod.get("securityContext", {}).get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    for container in containers(pod):
        rights = container.get("securityContext", {})
        mounts_for_node = any(m.get("mountPropagation") == "Bidirectional" for m in container["volumeMounts"])
        if rights.get("privileged"):
            if not mounts_for_node or container in pod["containers"]:
                yield f"{container['name']} is privileged"
        elif rights.get("allowPrivilegeEscalation") is not False or rights.get("capabilities", {}).get(
                "drop") != ["ALL"]:
            yield f"{container['name']} keeps rights that it does not need"
        if "cpu" not in container["resources"]["requests"] or "memory" not in container["resources"]["requests"]:
            yield f"{container['name']} requests no CPU or no memory"


def wrong_secrets(workload, objects):
    """Secrets and keys are files of root that at most one group may read, and the container's user may read them. Each
    daemon has a secret or a certificate of its role."""
    pod = pod_of(workload)
    container = pod["containers"][0]
    rights = pod.get("securityContext", {})
    if container["command"] != ["rekindle"]:
        return
    values = {e["name"]: e.get("value") for e in container.get("env", [])}
    values |= dict(word.split("=", 1) for word in container["args"] if "=" in word)
    named_by = {"REKINDLE_SECRET_FILE": "rekindle", "REKINDLE_TLS_KEY": "rekindle-client-tls",
                "--tls-key": f"{workload['metadata']['name']}-tls", "--etcd-key": "rekindle-etcd-client-tls",
                "--http-token-file": "rekindle-metrics"}
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    for name, wanted in named_by.items():
        if name not in values:
            continue
        path = values[name]
        volume = next((v for v in pod["volumes"] if v["name"] == mounts.get(os.path.dirname(path))), {})
        secret = volume.get("secret", {})
        mode = secret.get("defaultMode", 0o644)
        # The kubelet lets the group of fsGroup read what root may.
        group = "fsGroup" in rights and rights["fsGroup"] != 0
        if mode & 0o037 or not (rights.get("runAsUser") == 0 or (group and mode & 0o040)):
            yield f"rekindle refuses {path}, or its user cannot read it"
        if secret.get("secretName") != wanted or secret.get("optional"):
            yield f"it does not require the Secret `{wanted}`"
    if ("REKINDLE_SECRET_FILE" in values) == ("--tls-key" in values):
        yield "it needs a secret or a certificate"
    for mount in container["volumeMounts"]:
        if mount.get("subPath") and mount["name"] in ("tls", "client-tls", "etcd-tls", "metrics-token"):
            yield f"{mount['mountPath']} would not follow a renewal"


def wrong_schemes(workload, objects):
    """Metrics are open to everybody, or by https for a token. All of etcd is the same."""
    template = template_of(workload)
    container = template["spec"]["containers"][0]
    is_open = any(e["name"].endswith("_HTTP_OPEN") for e in container.get("env", []))
    if any(word.startswith("--metrics=") for word in container.get("args", [])):
        has_tokens = any(word.startswith("--http-token-file=") for word in container["args"])
        if is_open == has_tokens:
            yield "everybody may read" if is_open else "Prometheus may not read"
        scheme = template["metadata"].get("annotations", {}).get("prometheus.io/scheme", "http")
        if scheme != ("https" if has_tokens else "http"):
            yield f"the annotation prometheus.io/scheme says {scheme}"
    elif is_open:
        yield "it opens HTTP servers that it does not have"
    schemes = {scheme for o in objects if o["kind"] == "StatefulSet" for word in pod_of(o)["containers"][0]["args"]
               if not word.startswith("--listen-metrics-urls") for scheme in re.findall("(https?)://", word)}
    if len(schemes) > 1:
        yield "not all of etcd is https"


def wrong_memory(workload, objects):
    if workload["kind"] != "DaemonSet":
        return
    file, = [config["data"]["rekindle.toml"] for config in named(objects, "ConfigMap")
             if "rekindle.toml" in config["data"]]
    config = tomllib.loads(file)["agent"]
    resources = pod_of(workload)["containers"][0]["resources"]
    if "memory" in resources.get("limits", {}):
        yield "a limit of memory would end the agent, because its store counts"
    requested = size(resources["requests"].get("memory", "0"))
    if requested < size(config["budget"]) + AGENT_OWN_BYTES:
        yield f"it requests {requested >> 30} GiB of memory for a budget of {config['budget']}"
    if size(config["reserve"]) > size(config["budget"]):
        yield "the reserve is larger than the budget"


def wrong_stores(workload, objects):
    """The store has one path: on the node, in the agent, in engines and in their environment."""
    pod = pod_of(workload)
    volume = next((v for v in pod.get("volumes", []) if v["name"] == "store"), None)
    if volume is None:
        return
    container = pod["containers"][0]
    places = {volume["hostPath"]["path"], *(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "store"),
              *(e["value"] for e in container["env"] if e["name"] == "REKINDLE_STORE")}
    places |= set(re.findall(r"unix:(\S+?)/agent/agent\.sock", " ".join(map(str, commands_of(container)))))
    if places != {"/dev/shm/rekindle"}:
        yield f"several paths of the store: {sorted(places)}"
    if workload["kind"] == "DaemonSet":
        yield from wrong_keepers(pod)
        for container in pod.get("initContainers", []):
            host = {m["mountPath"] for m in container["volumeMounts"] if m["name"] == "shm"}
            if not any(f"store={path}/rekindle\n" in container["command"][-1] for path in host):
                yield "huge pages are mounted elsewhere than at the store"


def wrong_keepers(pod):
    """An agent that starts no keeper has one in a container beside it, in its store."""
    agent, *others = pod["containers"]
    keepers = [c for c in others if c.get("args", [])[:1] == ["keeper"]]
    if ("--external-keeper" in agent["args"]) != (len(keepers) == 1):
        yield f"{len(keepers)} containers are keepers of an agent with {agent['args']}"
    yield from (f"{c['name']} is no keeper of this store" for c in keepers
                if c["args"][1:] != ["--directory=/dev/shm/rekindle/agent"] or
                "/dev/shm/rekindle" not in {m["mountPath"] for m in c["volumeMounts"]})
