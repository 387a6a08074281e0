"""The processes of tools/bench/peers: a source, which serves the bytes of a file, and a reader, which fetches them.

    python peer_ends.py source|reader SYSTEM CONFIG

CONFIG is JSON. The process says one line of JSON when it is ready. A reader then answers each line of JSON on stdin:
{"memory": "warm" or "cold", "digest": true or false} moves the bytes once. A process ends when its stdin closes.
Libraries may print: their output goes to stderr.
"""
import base64
import concurrent.futures
import ctypes
import hashlib
import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback

RECEIVE_BYTES = 1 << 20
POLL_S = 1e-4


def parts(size, count):
    """(offset, length) of `count` contiguous parts."""
    edges = [size * index // count for index in range(count + 1)]
    return [(begin, end - begin) for begin, end in zip(edges, edges[1:])]


def die_with_parent():
    """Called in a new process: the kernel kills it when the thread that started it ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def cpu_seconds(pids):
    """User and system time so far. The clock of a process is made as the kernel's MAKE_PROCESS_CPUCLOCK makes it."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


class Mapping:
    """Shared memory: all of a file, or a new memory file without a page."""

    def __init__(self, size, path=None):
        self.size = size
        if path:
            descriptor, flags = os.open(path, os.O_RDWR), mmap.MAP_SHARED | mmap.MAP_POPULATE
        else:
            descriptor, flags = os.memfd_create("peers"), mmap.MAP_SHARED
            os.ftruncate(descriptor, size)
        self.map = mmap.mmap(descriptor, size, flags=flags)
        os.close(descriptor)
        first = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(first)
        # A mapping cannot be closed while a ctypes object refers to it.
        del first

    def fault(self):
        """Every page is there afterwards, with bytes that are not the source's."""
        ctypes.memset(self.address, 0x5A, self.size)

    def close(self):
        self.map.close()


class Sockets:
    """Plain blocking sockets, a thread for each at both ends."""

    class Source:
        def __init__(self, config, served):
            self.served = memoryview(served.map)
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            self.address = self.listener.getsockname()[1]
            threading.Thread(target=self.accept, daemon=True).start()

        def accept(self):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

        def serve(self, connection):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := connection.recv(16, socket.MSG_WAITALL):
                offset, size = (int.from_bytes(request[at:at + 8], "little") for at in (0, 8))
                connection.sendall(self.served[offset:offset + size])

    class Reader:
        def __init__(self, config, address):
            self.streams = [socket.create_connection(("127.0.0.1", address)) for _ in range(config["streams"])]
            self.pool = concurrent.futures.ThreadPoolExecutor(len(self.streams))

        def register(self, landing):
            self.landing = landing

        def read(self):
            with memoryview(self.landing.map) as view:
                list(self.pool.map(lambda stream, part: self.receive(view, stream, *part),
                                   self.streams, parts(self.landing.size, len(self.streams))))

        def receive(self, view, stream, offset, size):
            stream.sendall(offset.to_bytes(8, "little") + size.to_bytes(8, "little"))
            end = offset + size
            while offset < end:
                with view[offset:min(offset + RECEIVE_BYTES, end)] as window:
                    count = stream.recv_into(window)
                if count == 0:
                    raise ConnectionError("the source has closed a connection")
                offset += count

        def unregister(self):
            pass


class Memcpy:
    """numpy's copy from the mapped file, a thread for each core."""

    class Reader:
        def __init__(self, config, address):
            import numpy
            self.numpy = numpy
            self.threads = config["cores"]
            self.source = numpy.frombuffer(Mapping(config["size"], config["file"]).map, dtype=numpy.uint8)
            self.pool = concurrent.futures.ThreadPoolExecutor(self.threads)

        def register(self, landing):
            self.target = self.numpy.frombuffer(landing.map, dtype=self.numpy.uint8)

        def read(self):
            def copy(part):
                window = slice(part[0], part[0] + part[1])
                self.numpy.copyto(self.target[window], self.source[window])

            list(self.pool.map(copy, parts(len(self.source), self.threads)))

        def unregister(self):
            del self.target


class Mooncake:
    """transfer_sync_read of Mooncake's TransferEngine over tcp: `calls` at the same time, each for its part."""

    @staticmethod
    def engine():
        from mooncake.engine import TransferEngine
        engine = TransferEngine()
        check(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
        return engine

    class Source:
        def __init__(self, config, served):
            self.engine = Mooncake.engine()
            check(self.engine.register_memory(served.address, served.size), "register_memory")
            self.address = [self.engine.get_rpc_port(), served.address]

    class Reader:
        def __init__(self, config, address):
            self.engine = Mooncake.engine()
            self.target, self.remote = f"127.0.0.1:{address[0]}", address[1]
            self.calls = config["calls"]
            self.pool = concurrent.futures.ThreadPoolExecutor(self.calls)

        def register(self, landing):
            self.landing = landing
            check(self.engine.register_memory(landing.address, landing.size), "register_memory")

        def read(self):
            def one(part):
                offset, size = part
                return self.engine.transfer_sync_read(
                    self.target, self.landing.address + offset, self.remote + offset, size)

            for code in self.pool.map(one, parts(self.landing.size, self.calls)):
                check(code, "transfer_sync_read")

        def unregister(self):
            check(self.engine.unregister_memory(self.landing.address), "unregister_memory")


class Nixl:
    """READ of NIXL's UCX backend, one request for each stream at the same time. UCX_TLS chooses UCX's transports."""

    @staticmethod
    def agent(name, config):
        from nixl_cu12._api import nixl_agent, nixl_agent_config
        agent = nixl_agent(name, nixl_agent_config(backends=[]))
        agent.create_backend("UCX", {"num_workers": str(config["streams"])} | config["backend"])
        return agent

    class Source:
        def __init__(self, config, served):
            self.agent = Nixl.agent("source", config)
            self.agent.register_memory([(served.address, served.size, 0, "")], "DRAM")
            metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
            self.address = [metadata, served.address]

    class Reader:
        def __init__(self, config, address):
            self.agent = Nixl.agent("reader", config)
            self.streams, self.remote = config["streams"], address[1]
            name = self.agent.add_remote_agent(base64.b64decode(address[0]))
            self.peer = name.decode() if isinstance(name, bytes) else name

        def register(self, landing):
            self.registered = self.agent.register_memory([(landing.address, landing.size, 0, "")], "DRAM")

            def descriptors(base, part):
                return self.agent.get_xfer_descs([(base + part[0], part[1], 0)], "DRAM")

            self.requests = [self.agent.initialize_xfer("READ", descriptors(landing.address, part),
                                                        descriptors(self.remote, part), self.peer)
                             for part in parts(landing.size, self.streams)]

        def read(self):
            states = [self.agent.transfer(request) for request in self.requests]
            while "PROC" in states:
                # NIXL's own thread makes progress; polling without a pause would take a core from it.
                time.sleep(POLL_S)
                states = [self.agent.check_xfer_state(request) if state == "PROC" else state
                          for request, state in zip(self.requests, states)]
            if states != ["DONE"] * len(states):
                raise RuntimeError(f"a READ ended as {states}")

        def unregister(self):
            for request in self.requests:
                self.agent.release_xfer_handle(request)
            self.agent.deregister_memory(self.registered)


class Safetensors:
    """load_file of safetensors.numpy. The arrays are always in fresh memory."""

    class Reader:
        def __init__(self, config, address):
            import safetensors.numpy
            self.load, self.file = safetensors.numpy.load_file, config["file"]

        def measure(self, memory, digest):
            cpu, begin = cpu_seconds([os.getpid()]), time.perf_counter()
            tensors = self.load(self.file)
            answer = {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds([os.getpid()]) - cpu}
            return answer | ({"tensors": digest_tensors(tensors)} if digest else {})


def digest_tensors(tensors):
    """SHA-256 of the tensors' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(memoryview(tensors[name]).cast("B"))
    return digest.hexdigest()


class CheckpointEngine:
    """ParameterServer.update of checkpoint-engine into one GPU: one rank, and a worker process that copies each weight
    into the tensors of its model. torch and NCCL are those of the Python that runs this."""

    class Reader:
        def __init__(self, config, address):
            import torch
            from safetensors.torch import load_file
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            # Registering files of /dev/shm removes them, so the server gets tensors.
            tensors = load_file(config["file"])
            self.server = self.make_server(config)
            self.server.register_checkpoint("peers", named_tensors=tensors, use_inplace_pin_memory=False)
            self.server.gather_metas("peers")
            context = torch.multiprocessing.get_context("spawn")
            self.pipe, end = context.Pipe()
            shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
            self.worker = context.Process(target=checkpoint_engine_worker, args=(end, shapes), daemon=True)
            self.worker.start()
            self.pipe.recv()
            self.pids = [os.getpid(), self.worker.pid, *config["source_pids"]]

        def make_server(self, config):
            # ParameterServer would start a Mooncake engine over RDMA for a way of updating that is not measured.
            sys.modules["mooncake"] = None
            from checkpoint_engine.ps import ParameterServer
            return ParameterServer(rank=0, world_size=1, gpu_count=1, master_port=free_port())

        def measure(self, memory, digest):
            cpu, begin = cpu_seconds(self.pids), time.perf_counter()
            self.server.update("peers", self.receive)
            answer = {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds(self.pids) - cpu}
            if digest:
                self.pipe.send(None)
                answer["tensors"] = self.pipe.recv()
            return answer

        def receive(self, handles):
            self.pipe.send(handles[0][1])
            self.pipe.recv()


class RekindleServer:
    """Rekindle's class of the same name, with an agent and the same worker."""

    class Reader(CheckpointEngine.Reader):
        def make_server(self, config):
            sys.path.insert(0, config["package"])
            from rekindle.compat.checkpoint_engine import ParameterServer
            return ParameterServer(rank=0, world_size=1, gpu_count=1, agent=config["store"])


def checkpoint_engine_worker(pipe, shapes):
    """A worker of an engine: has the model's tensors on the GPU, and takes one update for each address from `pipe`.
    None instead of an address asks for the digest of the tensors."""
    die_with_parent()
    import torch
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc
    model = {name: torch.empty(shape, dtype=dtype, device="cuda:0") for name, (shape, dtype) in shapes.items()}

    def load(weights):
        for name, tensor in weights:
            model[name].copy_(tensor)

    context = zmq.Context()
    pipe.send("ready")
    while True:
        try:
            address = pipe.recv()
        except EOFError:
            return
        if address is None:
            host = {name: tensor.reshape(-1).view(torch.uint8).cpu().numpy() for name, tensor in model.items()}
            pipe.send(digest_tensors(host))
            continue
        update_weights_from_ipc(context, address, 0, run=load)
        pipe.send("updated")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check(code, call):
    if code != 0:
        raise RuntimeError(f"{call} returned {code}")


def move_once(reader, size, pids, memory, digest):
    """One read into new memory. Cold: the first touch of each page and the registration are part of the time."""
    landing = Mapping(size)
    if memory == "warm":
        landing.fault()
        reader.register(landing)
    cpu, begin = cpu_seconds(pids), time.perf_counter()
    if memory == "cold":
        reader.register(landing)
    reader.read()
    answer = {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds(pids) - cpu}
    reader.unregister()
    if digest:
        answer["file"] = hashlib.sha256(landing.map).hexdigest()
    landing.close()
    return answer


SYSTEMS = {"sockets": Sockets, "memcpy": Memcpy, "mooncake": Mooncake, "nixl": Nixl, "safetensors": Safetensors,
           "checkpoint-engine": CheckpointEngine, "rekindle-server": RekindleServer}


def answer_to(reader, config, command):
    if hasattr(reader, "measure"):
        return reader.measure(command["memory"], command["digest"])
    pids = [os.getpid(), *config["source_pids"]]
    return move_once(reader, config["size"], pids, command["memory"], command["digest"])


def commands():
    """The lines of stdin. A thread reads them, so that this process ends with its parent even while a library hangs."""
    lines = queue.SimpleQueue()

    def watch():
        for line in sys.stdin:
            lines.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        yield lines.get()


def main():
    role, system, config = sys.argv[1], SYSTEMS[sys.argv[2]], json.loads(sys.argv[3])
    sys.path += config["site"]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer):
        print(json.dumps(answer), file=answers, flush=True)

    try:
        if role == "source":
            served = Mapping(config["size"], config["file"])
            source = system.Source(config, served)
            say({"address": source.address})
            for _ in commands():
                pass
        reader = system.Reader(config, config.get("address"))
        say({})
        for command in commands():
            say(answer_to(reader, config, command))
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
    finally:
        # Threads of libraries do not keep a process that has ended.
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
