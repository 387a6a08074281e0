"""`serve_to` against HTTP servers that answer as the engines do, with checkpoint-engine's own
receivers as their workers."""
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from checkpoint_engine_receiver import Receiver
from conftest import PATIENCE_S, eventually
from test_checkpoint_engine import expected, make_tensors

import rekindle as rk
from rekindle.compat import checkpoint_engine as ce
from rekindle.compat.checkpoint_engine import update

DEVICES = ["double:0", "double:1"]


class Engine:
    """A server whose every update is `answer(engine, path, body)` → (status, JSON)."""

    def __init__(self, answer, readiness=None):
        self.requests, self.reports = [], {}
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, readiness)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.requests.append((self.path, body, dict(self.headers)))
                self.reply(*answer(engine, self.path, body))

            def reply(self, status, content):
                self.send_response(status)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def receive(self, handles, **options):
        """A worker for each device; {key: its report}. options: key → options of that one."""
        workers = {key: Receiver(address, *options.get(key.replace(":", ""), ()))
                   for key, address in handles.items()}
        self.reports = {key: worker.report() for key, worker in workers.items()}
        failed = [report for report in self.reports.values() if "error" in report]
        return (400, {"success": False, "message": failed[0]["error"]}) if failed else (
            200, {"success": True, "message": "done"})


@pytest.fixture(scope="module")
def published(rekindle):
    tensors = make_tensors(seed=1)
    rk.publish(make_tensors(seed=2), "served@6", agent=rekindle.store("a"))
    rk.publish(tensors, "served@7", agent=rekindle.store("a"))
    return tensors


@pytest.fixture
def store(rekindle, published):
    return rekindle.store("a")


def test_sglang_gets_the_newest_version_on_every_device(store, published, tmp_path):
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        served = ce.serve_to(engine.url, "served", devices=DEVICES, agent=store,
                             directory=tmp_path, headers={"Authorization": "Bearer x"})
    [(path, body, headers)] = engine.requests
    assert path == "/update_weights_from_ipc" and headers["Authorization"] == "Bearer x"
    assert body["weight_version"] == "7" and body["flush_cache"] is True
    assert all(address.startswith(f"ipc://{tmp_path}/") for address in body["zmq_handles"].values())
    nbytes = sum(tensor.nbytes for tensor in published.values())
    assert (served.model, served.version, served.devices, served.passes, served.nbytes) == (
        "served", 7, 2, 1, 2 * nbytes)
    assert sorted(engine.reports) == DEVICES
    for report in engine.reports.values():
        assert report[0]["tensors"] == expected(published) and report[0]["twice"] == []
    assert os.listdir(tmp_path) == []


def last_round(rekindle, model):
    """The newest round of the model, when it is over."""
    def over():
        rounds = [one for one in rk.status(coordinator=rekindle.coordinator)["rounds"]
                  if one["model"] == model]
        newest = max(rounds, key=lambda one: one["round"], default={"phase": "none"})
        return newest if newest["phase"] == "over" else None

    return eventually(over)


def test_the_devices_share_the_uploads(rekindle, store, published):
    rk.publish(published, "shared@1", agent=store)
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        ce.serve_to(engine.url, "shared", devices=DEVICES, agent=store)
    for report in engine.reports.values():
        assert report[0]["tensors"] == expected(published) and report[0]["twice"] == []
    done = last_round(rekindle, "shared")
    assert (len(done["members"]), done["ready"], done["by_broadcast"]) == (2, 2, 2), done


def test_one_device_has_no_round(rekindle, store, published):
    rk.publish(published, "alone@1", agent=store)
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        ce.serve_to(engine.url, "alone", devices=DEVICES[:1], agent=store)
    assert engine.reports["double:0"][0]["tensors"] == expected(published)
    assert "alone" not in {one["model"]
                           for one in rk.status(coordinator=rekindle.coordinator)["rounds"]}


def test_without_a_coordinator_every_device_uploads_all(rekindle, published, memory_directory):
    lonely = memory_directory / "lonely"
    rekindle._daemon("agent", "--listen", "127.0.0.1:0", "--node-id", "lonely", "--store", lonely,
                     "--gpu", "double:2")
    rk.publish(published, "lonely@1", agent=lonely)
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        ce.serve_to(engine.url, "lonely", devices=DEVICES, agent=lonely)
    for report in engine.reports.values():
        assert report[0]["tensors"] == expected(published)


def test_a_draft_model_takes_the_weights_over_the_same_socket(store, published):
    def answer(engine, path, body):
        return engine.receive(body["zmq_handles"], double0=["--passes", 3], double1=["--passes", 3])

    with Engine(answer) as engine:
        served = ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store)
    assert served.passes == 3
    for report in engine.reports.values():
        assert [one["tensors"] for one in report] == [expected(published)] * 3


@pytest.mark.parametrize("passes", [1, 2])
def test_workers_of_before_0_4_are_done_when_their_engine_says_so(store, published, passes):
    options = {device.replace(":", ""): ["--old", "--passes", passes] for device in DEVICES}
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"], **options)
                ) as engine:
        served = ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store)
    assert served.passes == passes
    assert served.nbytes == 2 * passes * sum(tensor.nbytes for tensor in published.values())
    for report in engine.reports.values():
        assert [one["tensors"] for one in report] == [expected(published)] * passes
        assert [one["hook"] for one in report] == [1] * passes


@pytest.mark.parametrize("old", [[], ["--old"]])
def test_post_processing_that_fails_is_the_engines_to_say(store, old):
    def answer(engine, path, body):
        return engine.receive(body["zmq_handles"], double1=["--fault", "hook", *old])

    with Engine(answer) as engine:
        with pytest.raises((rk.UnavailableError, ce.ReceiverLostError)):
            ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store)
    assert engine.reports["double:1"]["error"] == "ValueError: the hook fails"


def test_vllm_is_asked_by_collective_rpc(store, published):
    with Engine(lambda engine, path, body: engine.receive(body["args"][0])) as engine:
        ce.serve_to(engine.url, "served", 7, devices=DEVICES[:1], agent=store, engine="vllm",
                    request_timeout=PATIENCE_S)
    [(path, body, _)] = engine.requests
    assert path == "/collective_rpc" and body["method"] == "update_weights_from_ipc"
    assert body["timeout"] == PATIENCE_S
    assert engine.reports["double:0"][0]["tensors"] == expected(published)


def test_lmdeploy_is_asked_whether_it_is_ready(store, published):
    def answer(engine, path, body):
        return engine.receive(body["zmq_handles"])

    def serve(readiness):
        with Engine(answer, readiness) as engine:
            try:
                ce.serve_to(engine.url, "served", 7, devices=DEVICES[:1], agent=store,
                            engine="lmdeploy")
            finally:
                serve.engine = engine

    with pytest.raises(rk.UnavailableError, match="kv_cache"):
        serve({"ready": False, "message": "sleeping with kv_cache unavailable", "device_uuids": []})
    assert serve.engine.requests == []
    with pytest.raises(rk.InvalidError, match="double:1"):
        serve({"ready": True, "message": "", "device_uuids": DEVICES})
    assert serve.engine.requests == []
    serve({"ready": True, "message": "", "device_uuids": DEVICES[:1]})
    assert serve.engine.requests[0][0] == "/update_weights_from_ipc"
    assert list(serve.engine.requests[0][1]) == ["zmq_handles"]
    assert serve.engine.reports["double:0"][0]["tensors"] == expected(published)


def test_one_worker_that_fails_ends_the_others(store):
    def answer(engine, path, body):
        return engine.receive(body["zmq_handles"], double1=["--fault", "error"])

    with Engine(answer) as engine:
        with pytest.raises(ce.ReceiverError, match="no parameter of this name"):
            ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store,
                        buffer_bytes=1 << 16)
    assert "the sender failed" in engine.reports["double:1"]["error"]


def test_an_engine_that_refuses(store):
    with Engine(lambda *_: (503, {"detail": "weights are cached"})) as engine:
        with pytest.raises(rk.UnavailableError, match="answers 503 .* weights are cached"):
            ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store)
    with pytest.raises(rk.UnavailableError, match="refused"):
        ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store)


def test_an_engine_without_a_worker_on_one_of_the_devices(store):
    def answer(engine, path, body):
        return engine.receive({"double:0": body["zmq_handles"]["double:0"]})

    with Engine(answer) as engine:
        with pytest.raises(rk.UnavailableError, match="double:1: is it one of its devices"):
            ce.serve_to(engine.url, "served", 7, devices=DEVICES, agent=store)


def test_an_engine_is_not_asked_for_what_is_not_there(store):
    with Engine(lambda *_: (200, {"success": True})) as engine:
        with pytest.raises(rk.NotFoundError):
            ce.serve_to(engine.url, "nothing", 1, devices=DEVICES, agent=store)
        for devices in ([], ["double:0", "double:0"], ["cpu"]):
            with pytest.raises(rk.InvalidError):
                ce.serve_to(engine.url, "served", devices=devices, agent=store)
        with pytest.raises(rk.InvalidError, match="no engine 'tgi'"):
            ce.serve_to(engine.url, "served", devices=DEVICES, agent=store, engine="tgi")
    assert engine.requests == []


def test_a_function_instead_of_an_engine(store, published):
    """As with a ParameterServer's req_func, here with checkpoint-engine's own function for it."""
    from checkpoint_engine.api import request_inference_to_update
    for request in (request_inference_to_update, ce.request_inference_to_update):
        with Engine(lambda engine, path, body: engine.receive(body["args"][0])) as engine:
            ce.serve_to(lambda handles: request(f"{engine.url}/inference", dict(handles)), "served",
                        7, devices=DEVICES[:1], agent=store)
        [(path, body, _)] = engine.requests
        assert path == "/inference" and sorted(body) == ["args", "method", "timeout"]
        assert engine.reports["double:0"][0]["tensors"] == expected(published)


def test_the_command(store, published):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "rekindle.compat.checkpoint_engine", *map(str, arguments)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)

    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        done = run("served@7", "--url", engine.url, "--devices", "double:0,double:1", "--store",
                   store, "--header", "X-Key: a:b")
        assert done.returncode == 0, done.stderr
        assert "served@7: " in done.stdout and "to 2 devices" in done.stdout
        assert engine.requests[0][2]["X-Key"] == "a:b"
        assert engine.reports["double:1"][0]["tensors"] == expected(published)
        done = run("nothing", "--url", engine.url, "--devices", "double:0", "--store", store)
    assert done.returncode == 1 and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("fault", ["device process", "agent"])
def test_what_dies_in_the_middle_is_taken_up_again(rekindle, store, published, fault, monkeypatch):
    """The agent dies after the first bucket; its next life has what is left."""
    tensors = {f"layer.{index}": torch.full((1 << 20,), index, dtype=torch.int32)
               for index in range(24)}
    rk.publish(tensors, f"restarted@{1 + len(fault)}", agent=store)
    attached = []

    def attach(*given, **more):
        attached.append(rk.attach(*given, bucket_bytes=1 << 20, **more))
        return attached[-1]

    monkeypatch.setattr(update, "attach", attach)
    source = update.Source(f"restarted@{1 + len(fault)}", "double:0", (1 << 22, 24 << 22),
                           agent=str(store), attach_timeout=PATIENCE_S, timeout=PATIENCE_S)
    source.prepare()
    got = []
    for bucket in source.buckets():
        if not got:
            kill(rekindle, fault)
        for name, tensor in bucket:
            got.append(name)
            assert torch.equal(tensor, tensors[name])
    assert sorted(got) == sorted(tensors)
    assert len(attached) == 2


@pytest.fixture
def many(store):
    tensors = {f"layer.{index}": torch.full((1 << 20,), index, dtype=torch.int32)
               for index in range(24)}
    with contextlib.suppress(rk.DeniedError):
        rk.publish(tensors, "many@1", agent=store)
    return tensors


@pytest.fixture
def small_buckets(monkeypatch):
    """Of one tensor each. The sessions that were attached."""
    attached = []

    def attach(*given, **more):
        attached.append(rk.attach(*given, bucket_bytes=4 << 20, **more))
        return attached[-1]

    monkeypatch.setattr(update, "attach", attach)
    return attached


def test_a_worker_that_is_slow_in_a_round_gets_the_rest_without_it(
        rekindle, store, many, small_buckets):
    """It keeps a bucket for longer than the 5 s of a round."""
    def answer(engine, path, body):
        return engine.receive(body["zmq_handles"],
                              double1=["--fault", "sleep", "--at", 1, "--seconds", 7])

    with Engine(answer) as engine:
        ce.serve_to(engine.url, "many", devices=DEVICES, agent=store, buffer_bytes=8 << 20)
    for report in engine.reports.values():
        assert report[0]["tensors"] == expected(many) and report[0]["twice"] == []
    assert last_round(rekindle, "many")["by_broadcast"] == 1
    assert len(small_buckets) == 3


def test_a_device_process_that_dies_in_a_round(rekindle, store, many, small_buckets, monkeypatch):
    killed = threading.Event()
    arriving = update.Source._arriving

    def kill_first(source, session):
        for bucket in arriving(source, session):
            if not killed.is_set():
                killed.set()
                kill(rekindle, "device process")
            yield bucket

    monkeypatch.setattr(update.Source, "_arriving", kill_first)
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        ce.serve_to(engine.url, "many", devices=DEVICES, agent=store, buffer_bytes=8 << 20)
    for report in engine.reports.values():
        assert report[0]["tensors"] == expected(many) and report[0]["twice"] == []
    assert killed.is_set() and len(small_buckets) > 2


def kill(rekindle, fault):
    if fault == "agent":
        rekindle.kill_agent("a")
        rekindle.start_agent("a")
    else:
        os.kill(rk.status(agent=rekindle.store("a"))["devices"]["pid"], signal.SIGKILL)


def test_e1_e2_an_update_of_other_tensors_is_refused_before_the_engine_is_asked(store, published):
    other = dict(published)
    name, tensor = next((key, value) for key, value in other.items()
                        if value.dtype == torch.bfloat16 or value.dtype == torch.float32)
    rk.publish({**other, "extra": torch.ones(2)}, "other@1", agent=store)
    rk.publish({**other, name: tensor.to(torch.float8_e4m3fn)}, "other@2", agent=store)
    rk.publish(other, "other@3", agent=store)
    rk.publish(other, "other@4", agent=store)
    with Engine(lambda engine, path, body: engine.receive(body["zmq_handles"])) as engine:
        def serve(version, **more):
            return ce.serve_to(engine.url, "other", version, devices=DEVICES[:1], agent=store,
                               **more)

        with pytest.raises(rk.InvalidError, match=r"other@1 .* which has other@4: extra is float32"):
            serve(1, before=4)
        assert engine.requests == []
        serve(3)
        with pytest.raises(rk.InvalidError, match=f"other@2 .* other@3: {name} is float8_e4m3fn"):
            serve(2)
        assert len(engine.requests) == 1
        serve(4)
        serve(1, before="any")
        assert len(engine.requests) == 3
