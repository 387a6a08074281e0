"""Runs the containers of rendered manifests on this machine, as the nodes of a cluster would.

A Pod is a network namespace with an address of its own; a container is a bubblewrap sandbox with the mounts, the user,
the capabilities and the read-only root that its manifest asks for. Services are names in /etc/hosts. Not imitated:
seccomp, limits of memory, the scheduler, and restarts. Needs root."""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

PATIENCE_S = 60
# Of an image on Debian: programs and libraries, and the files of /etc that they read.
ROOT_FILES = ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/sbin", "/sbin",
              "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
              *(word for name in ("ld.so.cache", "nsswitch.conf", "passwd", "group", "ssl", "alternatives")
                for word in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")),
              "--perms", "0755", "--tmpfs", "/usr/local", "--perms", "0755", "--dir", "/usr/local/bin",
              "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/sys", "/sys"]


def can_run_pods():
    """Whether this machine lets us make namespaces with several users."""
    tried = ["bwrap", "--ro-bind", "/usr", "/usr", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/lib", "/lib",
             "--proc", "/proc", "--unshare-net", "--unshare-pid", "true"]
    return os.geteuid() == 0 and shutil.which("bwrap") is not None and \
        subprocess.run(tried, capture_output=True).returncode == 0


def eventually(fact, why, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not (found := fact()):
        assert time.monotonic() < deadline, why() if callable(why) else why
        time.sleep(0.1)
    return found


def run(*command, **more):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True,
                          timeout=PATIENCE_S, **more).stdout


class Cluster:
    """The objects of one set of manifests, the network of its Pods, and the files of nodes and volumes in `directory`,
    which should be on tmpfs. `secrets` has the data of each Secret by name."""

    def __init__(self, directory, objects, binary, secrets):
        self.directory = pathlib.Path(directory)
        self.objects = {(o["kind"], o["metadata"]["name"]): o for o in objects}
        self.binary = binary
        self.secrets = secrets
        self.pods = []
        self.prefix = f"rk{os.getpid()}x"
        self.switch = f"{self.prefix}s"
        self.hosts = self.directory / "hosts"
        self.namespaces = []
        self.tell_names()
        self._namespace(self.switch)
        run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "br0", "up")

    def _namespace(self, name):
        run("ip", "netns", "add", name)
        self.namespaces.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")

    def _link(self, name, number):
        """An address on the common network."""
        self._namespace(name)
        run("ip", "-n", self.switch, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0",
            "netns", name)
        run("ip", "-n", self.switch, "link", "set", f"p{number}", "master", "br0", "up")
        address = f"10.78.1.{number}"
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        return address

    def start(self, kind, name, ordinal=0, node="node-0"):
        """A Pod of this workload, started after its init containers have ended well."""
        pod = Pod(self, self.objects[kind, name], ordinal, node)
        self.pods.append(pod)
        pod.ip = self._link(f"{self.prefix}{len(self.pods)}", len(self.pods))
        pod.namespace = f"{self.prefix}{len(self.pods)}"
        self.tell_names()
        pod.start()
        return pod

    def tell_names(self):
        """Of the Pods that have not ended. In place, because the file is mounted in running Pods."""
        lines = [f"{pod.ip} {pod.name}.{service} {service}\n" for pod in self.pods if not pod.ended
                 for service in self.services_of(pod)]
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def services_of(self, pod):
        labels = pod.template["metadata"]["labels"].items()
        return [name for (kind, name), service in self.objects.items()
                if kind == "Service" and service["spec"]["selector"].items() <= labels]

    def close(self):
        for pod in self.pods:
            pod.kill()
        for name in reversed(self.namespaces):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Pod:
    def __init__(self, cluster, workload, ordinal, node):
        self.cluster = cluster
        self.workload = workload
        self.template = workload["spec"]["template"]
        self.spec = self.template["spec"]
        self.name = f"{workload['metadata']['name']}-{ordinal}"
        self.node = node
        # A Pod has the name of its predecessor, but none of its volumes.
        self.directory = cluster.directory / "pods" / self.name
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.ended = False
        self.ip = self.namespace = None
        self.pid = None
        self.process = None

    # --- what a container gets

    def _owned(self, path, mode):
        """With fsGroup, the group owns a volume and may do what its owner may."""
        group = self.spec.get("securityContext", {}).get("fsGroup")
        if group is not None:
            os.chown(path, -1, group)
            mode |= (mode & 0o700) >> 3
        os.chmod(path, mode)

    def _files(self, name, contents, mode):
        """A volume of files as the kubelet makes it: each name is a link to the file of the present version."""
        volume = self.directory / name
        if not volume.exists():
            (volume / "..version").mkdir(parents=True)
            (volume / "..data").symlink_to("..version")
            for key, value in contents.items():
                path = volume / "..version" / key
                path.write_bytes(value if isinstance(value, bytes) else value.encode())
                self._owned(path, mode)
                (volume / key).symlink_to(f"..data/{key}")
            for path in (volume, volume / "..version"):
                os.chmod(path, 0o755)
        return volume

    def renew(self, name):
        """What the kubelet does when a Secret has changed: one rename replaces all files of its volume."""
        volume = self.directory / name
        secret, = [v["secret"] for v in self.spec["volumes"] if v["name"] == name]
        number = len(list(volume.glob("..version*")))
        fresh = volume / f"..version{number}"
        fresh.mkdir()
        for key, value in self.cluster.secrets[secret["secretName"]].items():
            (fresh / key).write_bytes(value)
            self._owned(fresh / key, secret["defaultMode"])
        os.chmod(fresh, 0o755)
        (volume / "..data_tmp").symlink_to(fresh.name)
        os.rename(volume / "..data_tmp", volume / "..data")

    def volume(self, name):
        """The directory behind a volume of this Pod."""
        claims = self.workload["spec"].get("volumeClaimTemplates", [])
        if any(claim["metadata"]["name"] == name for claim in claims):
            return self._claim(f"{name}-{self.name}")
        volume, = [v for v in self.spec["volumes"] if v["name"] == name]
        if "secret" in volume:
            secret = self.cluster.secrets.get(volume["secret"]["secretName"])
            assert secret is not None, f"secret {volume['secret']['secretName']} not found"
            return self._files(name, secret, volume["secret"]["defaultMode"])
        if "configMap" in volume:
            config = self.cluster.objects["ConfigMap", volume["configMap"]["name"]]
            return self._files(name, config["data"], 0o644)
        if "persistentVolumeClaim" in volume:
            return self._claim(volume["persistentVolumeClaim"]["claimName"])
        if "hostPath" in volume:
            path = self.cluster.directory / self.node / volume["hostPath"]["path"].lstrip("/")
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True, mode=0o755)
            assert path.is_dir(), f"hostPath type check failed: {path} is not a directory"
            return path
        assert "emptyDir" in volume, volume
        path = self.directory / name
        if not path.exists():
            path.mkdir()
            self._owned(path, 0o2777)
        return path

    def _claim(self, name):
        path = self.cluster.directory / "claims" / name
        if not path.exists():
            path.mkdir(parents=True)
            self._owned(path, 0o2755)
        return path

    def _environment(self, container):
        fields = {"status.podIP": self.ip, "spec.nodeName": self.node, "metadata.name": self.name}
        found = {}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                found[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "configMapKeyRef" in source:
                reference = source["configMapKeyRef"]
                found[variable["name"]] = self.cluster.objects["ConfigMap", reference["name"]]["data"][reference["key"]]
            else:
                found[variable["name"]] = variable["value"]
        return found

    def command_line(self, container):
        """With $(NAME) replaced, as Kubernetes does in `command` and `args` (and nowhere else)."""
        environment = self._environment(container)
        return [re.sub(r"\$\((\w+)\)", lambda name: environment.get(name[1], name[0]), word)
                for word in [*container["command"], *container.get("args", [])]]

    def _sandbox(self, container, command, *more):
        mounts = [("--ro-bind", self.cluster.binary, "/usr/local/bin/rekindle"),
                  ("--ro-bind", self.cluster.hosts, "/etc/hosts")]
        mounts += [("--ro-bind" if mount.get("readOnly") else "--bind",
                    self.volume(mount["name"]) / mount.get("subPath", ""), mount["mountPath"])
                   for mount in container.get("volumeMounts", [])]
        # By itself, bubblewrap makes the directories above a mount for root only.
        above = sorted({str(path) for _, _, to in mounts for path in pathlib.PurePath(to).parents
                        if path.parts[1:2] not in ((), ("usr",), ("dev",))})
        rights = {**self.spec.get("securityContext", {}), **container.get("securityContext", {})}
        assert not rights.get("privileged"), "privileged containers are not run here"
        added = [name.lower() for name in rights["capabilities"].get("add", [])]
        kept = [word for name in ("setuid", "setgid", "setpcap", *added)
                for word in ("--cap-add", f"CAP_{name.upper()}")]
        user, group = rights["runAsUser"], rights["runAsGroup"]
        assert not (rights.get("runAsNonRoot") and user == 0), "container has runAsNonRoot and image will run as root"
        capabilities = ",".join(["-all", *(f"+{name}" for name in added)])
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **self._environment(container)}
        return [str(word) for word in (
            "ip", "netns", "exec", self.namespace, "bwrap", "--die-with-parent", "--unshare-pid", "--unshare-ipc",
            "--unshare-uts", "--hostname", self.name, "--as-pid-1", *more,
            *(word for path in above for word in ("--perms", "0755", "--dir", path)), *ROOT_FILES,
            *(word for mount in mounts for word in mount),
            *(["--remount-ro", "/"] if rights["readOnlyRootFilesystem"] else []), "--cap-drop", "ALL", *kept,
            "--clearenv", *(word for pair in environment.items() for word in ("--setenv", *pair)),
            "setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={rights.get('fsGroup', group)}",
            f"--bounding-set={capabilities}", f"--inh-caps={capabilities}", "--no-new-privs", "--", *command)]

    # --- its life

    @property
    def main(self):
        container, = self.spec["containers"]
        return container

    def start(self):
        for container in self.spec.get("initContainers", []):
            done = subprocess.run(self._sandbox(container, self.command_line(container)), capture_output=True,
                                  text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, f"{self.name}, init container {container['name']}: {done.stderr}"
        self.log = self.directory / "log"
        reader, writer = os.pipe()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._sandbox(self.main, self.command_line(self.main), "--info-fd", writer), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, pass_fds=[writer])
        os.close(writer)
        with os.fdopen(reader) as info:
            self.pid = json.loads(info.read() or "{}").get("child-pid")

    def _run(self, command):
        return subprocess.run(self._sandbox(self.main, command), capture_output=True, text=True, timeout=PATIENCE_S,
                              stdin=subprocess.DEVNULL)

    def execute(self, *command, code=0):
        """Runs a command in the container, as `kubectl exec` does, and returns what it printed."""
        done = self._run(command)
        assert done.returncode == code, f"{self.name}: {command}: {done.returncode} {done.stderr}{self.tail()}"
        return done.stdout + done.stderr

    def asked(self, *command):
        """The same; empty when the command fails."""
        done = self._run(command)
        return done.stdout if done.returncode == 0 else ""

    def passes(self, probe):
        """Whether a probe of the container succeeds now."""
        probe = self.main[probe]
        if "exec" in probe:
            return self._run(probe["exec"]["command"]).returncode == 0
        port, = [p["containerPort"] for p in self.main["ports"] if p["name"] == probe["httpGet"]["port"]]
        url = f"http://{self.ip}:{port}{probe['httpGet']['path']}"
        code = f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"
        return subprocess.run(["ip", "netns", "exec", self.namespace, sys.executable, "-c", code], capture_output=True,
                              timeout=PATIENCE_S).returncode == 0

    def wait_until(self, probe):
        def answered():
            assert self.process.poll() is None, f"{self.name} has ended: {self.tail()}"
            return self.passes(probe)
        eventually(answered, lambda: f"{self.name} does not pass {probe}: {self.tail()}")

    def rights(self):
        """The user and the effective capabilities of the container's process."""
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)[1]), \
            int(re.search(r"^CapEff:\s+(\w+)", status, re.MULTILINE)[1], 16)

    def listening(self):
        """TCP ports on which a process of the Pod listens, on other than loopback addresses."""
        lines = run("ip", "netns", "exec", self.namespace, "ss", "-Hltn").splitlines()
        addresses = [line.split()[3].rsplit(":", 1) for line in lines]
        return {int(port) for host, port in addresses if not host.startswith("127.")}

    def fetch(self, url):
        """What a process on the network of this Pod gets."""
        program = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"
        return run("ip", "netns", "exec", self.namespace, sys.executable, "-c", program, url)

    def tail(self):
        return "\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-15:]) if self.log.exists() else ""

    def terminate(self):
        """As the kubelet: SIGTERM, and the grace period. Returns the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        code = self.process.wait(self.spec["terminationGracePeriodSeconds"])
        self._end()
        return code

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid or self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)
        self._end()

    def _end(self):
        self.ended = True
        self.cluster.tell_names()
