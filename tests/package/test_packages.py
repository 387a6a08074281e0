"""The packages of tools/package, made from the installation in $REKINDLE_PREFIX: read, installed in a clean root, used
there by the command lines of the units, removed."""
import contextlib
import gzip
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
UNITS = ROOT / "tools/deploy/systemd"
PATIENCE_S = 60
BUILD_S = 600
# Lower is better; `systemd-analyze security` counts from 0 to 10. The agent may have no mount namespace.
MOST_EXPOSED = {"rekindle-coordinator": 1.1, "rekindle-agent": 5.1}
# These packages are no part of Debian, and librekindle is where it is on other systems.
ACCEPTED = "bogus-mail-host,bogus-mail-host-in-debian-changelog,maintainer-script-calls-systemctl," \
           "pkg-config-unavailable-for-cross-compilation"
# What would give a service a mount namespace of its own.
OWN_MOUNTS = re.compile(r"^(Protect(?!Clock)|Private|ReadOnly|ReadWrite|Inaccessible|Bind|Temporary|Root|Mount"
                        r"|DynamicUser|ExecPaths|NoExec|ProcSubset|LoadCredential)", re.MULTILINE)


def run(*command, **more):
    """Returns the output; a failure shows what was printed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                          **{"timeout": PATIENCE_S, "stdin": subprocess.DEVNULL, **more})
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def package(which, out):
    printed = run(ROOT / "tools/package", "--only", which, "--prefix", os.environ["REKINDLE_PREFIX"], "--out", out,
                  timeout=BUILD_S, env={**os.environ, "PYTHON": sys.executable})
    return [pathlib.Path(line) for line in printed.split("\n")[:-1]]


@pytest.fixture(scope="module")
def debs(tmp_path_factory):
    return {path.name.split("_")[0]: path for path in package("deb", tmp_path_factory.mktemp("debs"))}


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """The files of the image."""
    (image,) = package("image", tmp_path_factory.mktemp("image"))
    place = tmp_path_factory.mktemp("layout")
    run("tar", "-C", place, "-xf", image)
    return place


def blob(layout, descriptor):
    return layout / "blobs" / descriptor["digest"].replace(":", "/")


def read(layout, descriptor):
    return json.loads(blob(layout, descriptor).read_text())


def parts_of(layout):
    """The descriptor of the manifest, the manifest, and the configuration."""
    (first,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = read(layout, first)
    return first, manifest, read(layout, manifest["config"])


needs_root = pytest.mark.skipif(os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"]).returncode != 0,
                                reason="no root or no mounts here")


@contextlib.contextmanager
def unpacked(layout, layers):
    """A root directory, as a runtime unpacks layers of the image: later layers win."""
    root = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-root."))
    root.chmod(0o755)
    for descriptor in layers:
        run("tar", "-C", root, "--numeric-owner", "-xzpf", blob(layout, descriptor), timeout=BUILD_S)
        for gone in root.rglob(".wh.*"):
            run("rm", "-rf", gone, gone.with_name(gone.name[4:]))
    # The store is in /dev/shm, and the agent mounts huge pages there.
    run("mount", "-t", "proc", "proc", root / "proc")
    run("mount", "-t", "tmpfs", "tmpfs", root / "dev/shm")
    yield root
    run("umount", "--recursive", root / "dev/shm", root / "proc")
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def installed(layout):
    with unpacked(layout, parts_of(layout)[1]["layers"]) as root:
        yield root


def lines_of_unit(name, key):
    return re.findall(rf"^{key}=(.*)", (UNITS / f"{name}.service").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", MOST_EXPOSED)
def test_each_unit_is_valid_and_as_confined_as_recorded(name, tmp_path):
    unit = (UNITS / f"{name}.service").read_text()
    here = tmp_path / f"{name}.service"
    here.write_text(unit.replace("/usr/bin/rekindle", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0 and name not in done.stderr, done.stderr
    run("systemd-analyze", "security", "--offline=true", "--no-pager",
        f"--threshold={int(10 * MOST_EXPOSED[name])}", here)


@pytest.mark.parametrize("name", MOST_EXPOSED)
def test_the_units_work_with_the_certificates_of_the_guide(name, tmp_path):
    page = (ROOT / "docs/guides/slurm-and-systemd.md").read_text()
    drop_in, = re.findall(rf"```ini\n(# \S*/{name}.service.d/.*?)```", page, re.DOTALL)
    here = tmp_path / f"{name}.service"
    here.write_text((UNITS / here.name).read_text().replace("/usr/bin/rekindle", "/bin/true"))
    (tmp_path / f"{here.name}.d").mkdir()
    (tmp_path / f"{here.name}.d/certificates.conf").write_text(drop_in.replace("/usr/bin/rekindle", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0 and name not in done.stderr, done.stderr
    run("systemd-analyze", "security", "--offline=true", "--no-pager",
        f"--threshold={int(10 * MOST_EXPOSED[name])}", here)


def test_the_agents_unit_has_no_mounts_of_its_own():
    assert not OWN_MOUNTS.search((UNITS / "rekindle-agent.service").read_text())
    assert OWN_MOUNTS.search((UNITS / "rekindle-coordinator.service").read_text())
    assert lines_of_unit("rekindle-agent", "LimitMEMLOCK") == ["infinity"]


@pytest.mark.parametrize("name", MOST_EXPOSED)
def test_units_leave_no_core_dumps_which_would_have_keys(name):
    assert lines_of_unit(name, "LimitCORE") == ["0"]


def test_a_restart_of_the_agents_unit_leaves_its_keeper():
    assert lines_of_unit("rekindle-agent", "KillMode") == ["process"]
    assert lines_of_unit("rekindle-coordinator", "KillMode") == []


@pytest.mark.parametrize("name", ["bin/rekindle", "lib*/**/librekindle.so.1"])
def test_programs_are_hardened(name):
    program = next(pathlib.Path(os.environ["REKINDLE_PREFIX"]).glob(name))
    read = run("readelf", "--wide", "--headers", "--dynamic", "--dyn-syms", program)
    assert re.search(r"Type:\s+DYN", read), "its addresses are not chosen anew for each process"
    assert "GNU_RELRO" in read and re.search(r"FLAGS.*NOW", read), "its table of functions can be overwritten"
    assert re.search(r"GNU_STACK.* RW ", read), "its stack can be executed"
    assert "__stack_chk_fail" in read, "it has no stack protector"


def test_lintian_finds_nothing_else(debs):
    run("lintian", "--allow-root", "--fail-on", "error,warning", "--suppress-tags", ACCEPTED, *debs.values())


def test_the_packages_depend_on_each_other_and_on_the_libraries_of_this_release(debs):
    version = run("dpkg-deb", "--field", debs["rekindle"], "Version").strip()
    depends = {name: run("dpkg-deb", "--field", path, "Depends") for name, path in debs.items()}
    assert f"librekindle1 (= {version})" in depends["rekindle"]
    assert f"librekindle1 (= {version})" in depends["librekindle-dev"]
    assert "libibverbs1" in depends["rekindle"] and "libprotobuf" in depends["rekindle"]
    assert "libprotobuf" not in depends["librekindle1"] and "libc6" in depends["librekindle1"]


def test_the_configuration_file_is_what_the_command_prints(debs, tmp_path):
    run("dpkg-deb", "-x", debs["rekindle"], tmp_path)
    example = run(tmp_path / "usr/bin/rekindle", "config", "example")
    assert (tmp_path / "etc/rekindle/rekindle.toml").read_text() == example
    control = run("dpkg-deb", "-I", debs["rekindle"], "conffiles")
    assert control == "/etc/rekindle/rekindle.toml\n"


@needs_root
def test_the_image_is_what_its_descriptors_say(layout):
    first, manifest, config = parts_of(layout)
    kind = "application/vnd.oci.image."
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert (first["mediaType"], manifest["config"]["mediaType"]) == (kind + "manifest.v1+json", kind + "config.v1+json")
    assert manifest["schemaVersion"] == 2 and manifest["mediaType"] == first["mediaType"]
    described = [first, manifest["config"], *manifest["layers"]]
    for descriptor in described:
        content = blob(layout, descriptor).read_bytes()
        assert descriptor["size"] == len(content)
        assert descriptor["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert {path.name for path in (layout / "blobs/sha256").iterdir()} == {d["digest"][7:] for d in described}
    for descriptor, digest in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        assert descriptor["mediaType"] == kind + "layer.v1.tar+gzip"
        assert digest == f"sha256:{hashlib.sha256(gzip.decompress(blob(layout, descriptor).read_bytes())).hexdigest()}"
    assert len(config["history"]) == len(manifest["layers"])
    assert (config["os"], config["config"]["Entrypoint"]) == ("linux", ["rekindle"])


@needs_root
def test_the_second_layer_has_the_packages_and_not_the_base(layout):
    base, own = (tarfile.open(blob(layout, d)).getnames() for d in parts_of(layout)[1]["layers"])
    assert "usr/bin/rekindle" in own and "./usr/bin/apt" in base
    assert "usr/bin/apt" not in own and "etc/resolv.conf" not in own
    assert not [name for name in own if re.match("root/|var/lib/apt/lists/.*_", name)]


@needs_root
def test_the_tarball_needs_nothing_but_the_base(layout, tmp_path):
    (tarball,) = package("tarball", tmp_path)
    with unpacked(layout, parts_of(layout)[1]["layers"][:1]) as root:
        run("tar", "-C", root / "opt", "--strip-components=1", "-xzf", tarball)
        assert "All of it worked" in run("chroot", root, "/opt/bin/rekindle", "demo", "--gib", "0.02")


class Service:
    """A daemon of a unit in `root`: its ExecStart, its user, its capabilities and what systemd tells it."""

    def __init__(self, root, name):
        (line,) = lines_of_unit(name, "ExecStart")
        user = [*lines_of_unit(name, "User"), "root"][0]
        dropped = [cap for line in lines_of_unit(name, "CapabilityBoundingSet") for cap in line.lstrip("~").split()]
        bounds = ",".join("-" + cap.removeprefix("CAP_").lower() for cap in dropped) or "-all"
        command = ["env", "-i", "PATH=/usr/bin"]
        for state in lines_of_unit(name, "StateDirectory"):
            run("chroot", root, "install", "-d", "-m", "700", "-o", user, f"/var/lib/{state}")
            command.append(f"STATE_DIRECTORY=/var/lib/{state}")
        command += ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--bounding-set", bounds]
        command += [word.replace("${CREDENTIALS_DIRECTORY}", "/run/credentials") for word in shlex.split(line)]
        self.log = root / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(["chroot", root, *command], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=log)

    def address(self):
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"^\w+ listening on (\S+)$", self.log.read_text(), re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found[1]

    def stop(self):
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.log.unlink()


@needs_root
def test_installed_daemons_serve_a_model_and_purge_leaves_only_the_store(installed):
    version = (ROOT / "CMakeLists.txt").read_text().split("rekindle VERSION ")[1].split()[0]
    assert run("chroot", installed, "rekindle", "--version").strip() == f"rekindle {version}"
    assert "rekindle" not in (installed / "etc/passwd").read_text()  # The image has no systemd, which makes the user.
    secret = installed / "etc/rekindle/secret"
    secret.write_text("a secret of more than 16 bytes\n")
    run("systemd-sysusers", f"--root={installed}", "rekindle.conf")
    run("systemd-tmpfiles", f"--root={installed}", "--create", "rekindle.conf")
    assert secret.stat().st_mode & 0o777 == 0o600
    # As systemd 254 hands it over.
    run("chroot", installed, "install", "-D", "-m", "440", "-g", "rekindle", "/etc/rekindle/secret",
        "/run/credentials/secret")
    config = installed / "etc/rekindle/rekindle.toml"
    config.write_text('[coordinator]\nlisten = "127.0.0.1:0"\n')
    services = []

    def command(*words):
        return run("chroot", installed, "rekindle", *words, "--secret-file", "/etc/rekindle/secret", "--coordinator",
                   coordinator)

    try:
        services.append(Service(installed, "rekindle-coordinator"))
        coordinator = services[0].address()
        config.write_text(f'coordinator = "{coordinator}"\n[agent]\nlisten = "127.0.0.1:0"\nbudget = "256MiB"\n')
        services.append(Service(installed, "rekindle-agent"))
        services[1].address()
        command("demo", "--model-only", "/root/model", "--gib", "0.02")
        assert "published small@1" in command("publish", "small@1", "/root/model")
        assert "every byte verified" in command("pull", "small", "--to", "/dev/shm/pulled")
        assert "small@1" in command("status")
    finally:
        codes = [service.stop() for service in reversed(services)]
    assert codes == [0, 0]
    assert list((installed / "var/lib/rekindle/coordinator").iterdir())

    run("chroot", installed, "dpkg", "--remove", "rekindle")
    assert not (installed / "usr/bin/rekindle").exists() and config.exists() and secret.exists()
    run("chroot", installed, "dpkg", "--purge", "rekindle", "librekindle1")
    assert run("find", installed, "-xdev", "-mindepth", 1, "-name", "*rekindle*") == ""
    assert list((installed / "dev/shm/rekindle").glob("**/*.safetensors"))
