#!/usr/bin/env python3
"""Writes an OCI image layout, as a tar file on standard output, for `skopeo copy oci-archive:…` and `podman load`.

oci_image.py BASE ROOT VERSION ARCHITECTURE SECONDS: the first layer is the tar file BASE, the second the differences of
the directory ROOT, in which BASE was unpacked. SECONDS (since 1970) is the time of creation. Needs no daemon."""
import gzip
import hashlib
import io
import json
import os
import pathlib
import sys
import tarfile
import tempfile
import time

MEDIA = "application/vnd.oci.image."


def identity(member):
    """The parts of a file's entry that change with the file."""
    rights = member.type, member.mode & 0o7777, member.uid, member.gid
    if member.isdir():
        return rights
    return *rights, member.size if member.isreg() else 0, member.linkname, int(member.mtime)


def write_differences(base, root, layer):
    """A tar file of the paths of `root` that `base` has not, or has otherwise; `.wh.NAME` stands for a deleted one."""
    with tarfile.open(base) as before:
        old = {os.path.normpath(m.name): m for m in before}
    for member in old.values():
        if member.islnk():
            target = old[os.path.normpath(member.linkname)]
            member.type, member.linkname, member.size = target.type, "", target.size
    found = set()
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as out:
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            found.add(name)
            out.inodes.clear()  # A hard link is written as a file: its other name may be in the first layer.
            member = out.gettarinfo(path, name)
            if name in old and identity(member) == identity(old[name]):
                continue
            member.mtime = int(member.mtime)
            with open(path, "rb") if member.isreg() else io.BytesIO() as content:
                out.addfile(member, content)
        for name in sorted(old.keys() - found - {"."}):
            parent, _, leaf = name.rpartition("/")
            if not parent or parent in found:
                out.addfile(tarfile.TarInfo(f"{parent}/.wh.{leaf}".lstrip("/")))


class Layout:
    def __init__(self, directory):
        self.blobs = directory / "blobs/sha256"
        self.blobs.mkdir(parents=True)

    def add(self, kind, content):
        """Returns the descriptor of a blob with the bytes of the file `content`."""
        partial = self.blobs / "partial"
        digest, size = hashlib.sha256(), 0
        with partial.open("wb") as blob:
            while block := content.read(1 << 20):
                digest.update(block)
                size += blob.write(block)
        partial.rename(self.blobs / digest.hexdigest())
        return {"mediaType": MEDIA + kind, "digest": f"sha256:{digest.hexdigest()}", "size": size}

    def add_json(self, kind, value):
        return self.add(kind, io.BytesIO(json.dumps(value, sort_keys=True).encode()))

    def add_layer(self, tar):
        """Returns the descriptor of the compressed layer, and the digest of the tar file in it."""
        digest = hashlib.sha256()
        with tempfile.TemporaryFile() as packed:
            with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as out, \
                    open(tar, "rb") as plain:
                while block := plain.read(1 << 20):
                    digest.update(block)
                    out.write(block)
            packed.seek(0)
            return self.add("layer.v1.tar+gzip", packed), f"sha256:{digest.hexdigest()}"


def write_image(base, root, version, architecture, seconds, output):
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    with tempfile.TemporaryDirectory() as work:
        directory = pathlib.Path(work, "layout")
        layout = Layout(directory)
        differences = pathlib.Path(work, "layer.tar")
        write_differences(base, root, differences)
        layers, digests = zip(layout.add_layer(base), layout.add_layer(differences))
        config = layout.add_json("config.v1+json", {
            "architecture": architecture, "os": "linux", "created": created,
            "config": {"Entrypoint": ["rekindle"],
                       "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": digests},
            "history": [{"created": created, "created_by": what} for what in ("mmdebstrap", f"rekindle {version}")]})
        manifest = layout.add_json("manifest.v1+json", {
            "schemaVersion": 2, "mediaType": MEDIA + "manifest.v1+json", "config": config, "layers": layers,
            "annotations": {"org.opencontainers.image.version": version}})
        index = {"schemaVersion": 2, "mediaType": MEDIA + "index.v1+json", "manifests": [
            {**manifest, "platform": {"os": "linux", "architecture": architecture},
             "annotations": {"org.opencontainers.image.ref.name": version}}]}
        (directory / "index.json").write_text(json.dumps(index, sort_keys=True))
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        with tarfile.open(fileobj=output, mode="w|") as out:
            for path in sorted(directory.rglob("*")):
                member = out.gettarinfo(path, str(path.relative_to(directory)))
                member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
                with open(path, "rb") if member.isreg() else io.BytesIO() as content:
                    out.addfile(member, content)


if __name__ == "__main__":
    base_tar, tree, software, machine, epoch = sys.argv[1:]
    write_image(base_tar, pathlib.Path(tree), software, machine, int(epoch), sys.stdout.buffer)
