"""What a disk may hold after a power cut, from a record of disk_recorder.c.

The model relies on what every file system with a journal promises, and is as unkind as that allows:

- The bytes and the size of a file are durable as of its last fsync or fdatasync. Of what came later
  each sector may be there or not, and the size may have grown without the bytes (zeros).
- An entry of a directory (a file or directory that was created, linked, renamed or unlinked) is
  durable after an fsync of that directory. Before it each such change may be there or not, in any
  order, whether or not the bytes of the file are. A rename is one change: it is there on both sides or on
  none, and the fsync of either directory makes it durable.

So renaming a file that was not synced may leave an empty file under the new name, and syncing a file in a
directory that was not synced may leave no file at all.
"""

import functools
import hashlib
import json
import pathlib
import random
import re

SECTOR = 512
TEARS = 8  # different ways to tear a file


class CannotTell(Exception):
    """The record has an operation whose effect on a disk this model does not know."""


class Content:
    """The bytes of a file. Equal bytes are the same object."""

    __slots__ = ("data", "digest")
    known: dict[bytes, "Content"] = {}

    @staticmethod
    def of(data: bytes) -> "Content":
        digest = hashlib.blake2b(data, digest_size=16).digest()
        content = Content.known.get(digest)
        if content is None:
            content = Content.known[digest] = Content()
            content.data = data
            content.digest = digest
        return content


EMPTY = Content.of(b"")


class File:
    def __init__(self, content=None):
        self.durable = EMPTY
        self.seen = [content] if content else []  # since the last sync, oldest first

    @property
    def current(self):
        return self.seen[-1] if self.seen else self.durable

    @property
    def dirty(self):
        return any(content is not self.durable for content in self.seen)

    def sync(self):
        self.durable = self.current
        self.seen = []

    def written(self, content):
        if content is not self.current or not self.seen:
            self.seen.append(content)

    def lost(self):
        return self.durable

    def grown(self):
        """The new size; the bytes that were not there at the last sync are zeros."""
        return grown(self.durable, self.current)

    def torn(self, seed):
        """Each sector from before or from now."""
        return torn(self.grown(), self.current, seed)


@functools.lru_cache(maxsize=None)
def grown(durable, current):
    size = len(current.data)
    return Content.of(durable.data[:size].ljust(size, b"\0"))


@functools.lru_cache(maxsize=None)
def torn(old, new, seed):
    old, new = old.data, new.data
    pick = random.Random(seed)
    # At most some 64 pieces, of a sector at least.
    piece = max(SECTOR, len(new) // 64 // SECTOR * SECTOR)
    pieces = [(new if pick.random() < 0.5 else old)[at : at + piece] for at in range(0, len(new), piece)]
    return Content.of(b"".join(pieces))


class Directory:
    def __init__(self):
        self.entries = {}  # as the processes see it
        self.durable = {}  # name -> File or Directory


class Change:
    """One operation on names: entries that were set, or removed (None), together."""

    def __init__(self, sets):
        self.sets = sets  # (directory, name, node or None)


class Disk:
    def __init__(self):
        self.root = Directory()
        self.pending = []
        self.nodes = {}  # inode number -> node

    def find(self, path):
        node = self.root
        if path != ".":
            for part in path.split("/"):
                node = node.entries[part]
        return node

    def parent(self, path):
        above, _, name = path.rpartition("/")
        return self.find(above or "."), name

    def change(self, *sets):
        for directory, name, node in sets:
            if node is None:
                directory.entries.pop(name, None)
            else:
                directory.entries[name] = node
        self.pending.append(Change(list(sets)))

    def add(self, inode, path, node):
        self.nodes[inode] = node
        self.change((*self.parent(path), node))

    def remove(self, path):
        self.change((*self.parent(path), None))

    def rename(self, old, new):
        node = self.find(old)
        self.change((*self.parent(old), None), (*self.parent(new), node))

    def sync_directory(self, directory):
        for at, change in enumerate(self.pending):
            if not any(where is directory for where, _, _ in change.sets):
                continue
            for where, name, node in change.sets:
                if node is None:
                    where.durable.pop(name, None)
                else:
                    where.durable[name] = node
                # What an earlier change would have set there is history.
                for earlier in self.pending[:at]:
                    earlier.sets = [s for s in earlier.sets if not (s[0] is where and s[1] == name)]
            change.sets = []
        self.pending = [change for change in self.pending if change.sets]


class Cut:
    """Images of the disk at one moment."""

    def __init__(self, disk):
        self.disk = disk
        self.dirty = self.dirty_files()

    def dirty_files(self):
        found, seen = [], set()

        def walk(directory):
            if id(directory) in seen:
                return
            seen.add(id(directory))
            nodes = list(directory.entries.values()) + list(directory.durable.values())
            for node in nodes + [s[2] for c in self.disk.pending for s in c.sets if s[0] is directory]:
                if isinstance(node, Directory):
                    walk(node)
                elif node is not None and id(node) not in seen:
                    seen.add(id(node))
                    if node.dirty:
                        found.append(node)

        walk(self.disk.root)
        return found

    def image(self, changes, content):
        """PATH -> None for a directory, or Content. `content` chooses the bytes of a file."""
        over = {}
        for change in changes:
            for directory, name, node in change.sets:
                over.setdefault(id(directory), {})[name] = node
        tree = {}

        def build(directory, path):
            entries = directory.durable
            if id(directory) in over:
                entries = {**entries, **over[id(directory)]}
            for name, node in entries.items():
                if isinstance(node, Directory):
                    tree[path + name] = None
                    build(node, path + name + "/")
                elif node is not None:
                    tree[path + name] = content(node)

        build(self.disk.root, "")
        return tree

    def images(self, rng):
        """(what was lost, image), many of them alike."""
        pending = list(self.disk.pending)
        now = lambda node: node.current
        yield "nothing unsynced is there", self.image([], File.lost)
        yield "all is there", self.image(pending, now)
        if not pending and not self.dirty:
            return
        yield "no name, all bytes", self.image([], now)
        yield "all names, no bytes", self.image(pending, File.lost)
        yield "all names, sizes without bytes", self.image(pending, File.grown)
        for _ in range(2):
            seed = rng.randrange(TEARS)
            yield "all names, torn bytes", self.image(pending, lambda node: node.torn(seed))
        for one in self.dirty:
            yield "all names, bytes of one file only", self.image(
                pending, lambda node: node.current if node is one else node.durable
            )
            yield "all names, all bytes but of one file", self.image(
                pending, lambda node: node.durable if node is one else node.current
            )
            yield "all names, all bytes, one file only grown", self.image(
                pending, lambda node: node.grown() if node is one else node.current
            )
            for content in one.seen[:-1]:
                yield "all names, one file as it was meanwhile", self.image(
                    pending, lambda node: content if node is one else node.current
                )
        some = pending if len(pending) <= 12 else rng.sample(pending, 8) + pending[-4:]
        for one in some:
            others = [change for change in pending if change is not one]
            yield "one name", self.image([one], now)
            yield "one name, no bytes", self.image([one], File.lost)
            yield "all names but one", self.image(others, now)
            yield "all names but one, no bytes", self.image(others, File.lost)
        for _ in range(4):
            chosen = [change for change in pending if rng.random() < 0.5]
            seed = rng.randrange(TEARS)
            ways = [now, File.lost, File.grown, lambda node: node.torn(seed)]
            way = {}
            yield "some names, some bytes", self.image(
                chosen, lambda node: way.setdefault(id(node), rng.choice(ways))(node)
            )


class Site:
    """A place in the program that syncs: its innermost callers, and what kind of path it syncs."""

    def __init__(self, operation, path, callers):
        self.operation = operation
        pattern = re.sub(r"[0-9a-f]{16}", "HEX", path)
        pattern = re.sub(r"[\w%]+@\d+", "MODEL@VERSION", pattern)
        self.pattern = re.sub(r"\d+", "N", pattern)
        self.callers = callers.split(",")
        self.key = (operation, self.pattern, tuple(self.callers[:SITE_FRAMES]))


SITE_FRAMES = 3


class Trace:
    """The lines of a record. Lines by the harness are ("say", JSON)."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.lines = [line.split("\t") for line in (self.directory / "trace").read_text().splitlines()]
        self.contents = {}

    def content(self, name):
        if name not in self.contents:
            self.contents[name] = Content.of((self.directory / name).read_bytes())
        return self.contents[name]

    def sites(self):
        """KEY -> Site, in the order in which they were first passed."""
        found = {}
        for _, operation, *words in self.lines:
            if operation in ("sync", "syncdir"):
                site = Site(operation, words[1], words[2])
                found.setdefault(site.key, site)
        return found

    def replay(self, without=None):
        """Yields (line number, disk, what the harness said or None) after each operation. The syncs of the
        site `without` do nothing; disk.differs once there was one."""
        disk = Disk()
        disk.differs = without is None
        rots = None  # the file in which bits flip on the disk itself
        for number, (_, operation, *words) in enumerate(self.lines, 1):
            said = None
            if operation == "say":
                said = json.loads(words[0])
                if "rots" in said:
                    rots = disk.find(said["rots"]) if said["rots"] else None
            elif operation == "mkdir":
                disk.add(words[0], words[1], Directory())
            elif operation == "create":
                disk.add(words[0], words[1], File())
            elif operation == "link":
                node = disk.nodes.get(words[0])
                if node is None or not isinstance(node, File):
                    node = File()  # a file from outside, of which nothing is known to be durable
                disk.add(words[0], words[1], node)
            elif operation == "content":
                node = disk.nodes.get(words[0])
                if node is not None:
                    node.written(self.content(words[1]))
                    if node is rots:
                        node.sync()
            elif operation in ("unlink", "rmdir"):
                disk.remove(words[0])
            elif operation == "rename":
                disk.rename(words[0], words[1])
            elif operation in ("sync", "syncdir"):
                if without is not None and Site(operation, words[1], words[2]).key == without:
                    disk.differs = True
                else:
                    node = disk.nodes.get(words[0], disk.root if words[1] == "." else None)
                    if isinstance(node, Directory):
                        disk.sync_directory(node)
                    elif node is not None:
                        node.sync()
            else:
                raise CannotTell(f"what does this do to a disk: {operation} {words}?")
            yield number, disk, said


def difference(disk, directory):
    """What the model says that the directory holds, and what it does hold: "" or the first difference."""

    def compare(node, path):
        found = sorted(p.name for p in path.iterdir() if not p.is_socket())
        if found != sorted(node.entries):
            return f"{path} holds {found}, the record says {sorted(node.entries)}"
        for name, below in node.entries.items():
            if isinstance(below, Directory):
                differs = compare(below, path / name)
            elif (path / name).read_bytes() != below.current.data:
                differs = f"{path / name} has other bytes than the record"
            else:
                differs = ""
            if differs:
                return differs
        return ""

    return compare(disk.root, pathlib.Path(directory))


def write_image(tree, directory):
    directory.mkdir(mode=0o700, parents=True)
    for path, content in tree.items():
        if content is None:
            (directory / path).mkdir(mode=0o700)
        else:
            (directory / path).write_bytes(content.data)
            (directory / path).chmod(0o600)
