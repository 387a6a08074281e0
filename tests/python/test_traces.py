"""One operation over real processes is one trace: what a collector gets, what `trace` and `explain` print."""
import http.server
import json
import os
import signal
import subprocess
import sys
import threading

import numpy
import pytest
import safetensors.numpy
from conftest import BINARY, PATIENCE_S, Rekindle, eventually, run_python

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


class Collector:
    """A stub of an OpenTelemetry collector. Checks the shape of each request."""

    def __init__(self):
        self.spans, self.problems = [], []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/json"
                    collector.take(json.loads(body))
                except (AssertionError, KeyError, TypeError, ValueError) as error:
                    collector.problems.append(f"{error!r} {body[:500]}")
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request):
        assert set(request) == {"resourceSpans"}
        for process in request["resourceSpans"]:
            names = attributes(process["resource"])
            for scope in process["scopeSpans"]:
                assert scope["scope"]["name"] == "rekindle"
                for span in scope["spans"]:
                    assert len(span["traceId"]) == 32 and int(span["traceId"], 16)
                    assert len(span["spanId"]) == 16 and int(span["spanId"], 16)
                    assert len(span.get("parentSpanId", CALLER)) == 16
                    assert isinstance(span["startTimeUnixNano"], str) and isinstance(span["endTimeUnixNano"], str)
                    assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
                    self.spans.append({**span, "service": names["service.name"],
                                       "node": names["service.instance.id"], "known": attributes(span)})

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def attributes(of):
    found = {}
    for attribute in of["attributes"]:
        (kind, value), = attribute["value"].items()
        assert kind in ("stringValue", "intValue") and isinstance(value, str)
        found[attribute["key"]] = int(value) if kind == "intValue" else value
    return found


@pytest.fixture(scope="module")
def fleet(memory_directory):
    """A coordinator, agents `a` and `b` that hold m@1, and the collector that all of them tell. `a` sends
    200 MB/s to each puller, and `b` 20 MB/s."""
    collector = Collector()

    class Told(Rekindle):
        def _daemon(self, role, *arguments):
            rate = ("--max-rate", "20MB" if "b" in arguments else "200MB") if role == "agent" else ()
            return super()._daemon(role, *arguments, "--otlp", collector.url, *rate)

    fleet = Told(memory_directory)
    fleet.collector = collector
    try:
        generator = numpy.random.default_rng(5)
        tensors = {f"layer.{i}": generator.integers(256, size=4 << 20, dtype=numpy.uint8) for i in range(16)}
        safetensors.numpy.save_file(tensors, memory_directory / "model.safetensors")
        fleet.publish("m@1", memory_directory / "model.safetensors")
        fleet.run("pull", "m@1", "--store", fleet.store("b"), "--coordinator", fleet.coordinator)
        status = ("status", "--coordinator", fleet.coordinator)
        eventually(lambda: fleet.run(*status)["versions"][0]["whole_copies"] == 2)
        yield fleet
    finally:
        fleet.close()
        collector.close()


def test_a_pull_is_one_trace_in_all_processes(fleet):
    fleet.environment["TRACEPARENT"] = f"00-{TRACE}-{CALLER}-01"
    try:
        report = fleet.pull_to("m@1", fleet.directory / "one", "--transport", "tcp", "--otlp", fleet.collector.url)
    finally:
        del fleet.environment["TRACEPARENT"]
    assert report["trace"] == TRACE

    def trace():
        found = [span for span in fleet.collector.spans if span["traceId"] == TRACE]
        services = {(span["service"], span["node"]) for span in found if span["service"] == "rekindle-agent"}
        complete = services == {("rekindle-agent", "a"), ("rekindle-agent", "b")}
        return complete and {span["service"] for span in found} >= {"rekindle-command", "rekindle-coordinator"} and found

    spans = eventually(trace)
    assert not fleet.collector.problems
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans), "a span was sent twice"

    def above(span):
        return [by_id[span["parentSpanId"]]["name"]] + above(by_id[span["parentSpanId"]]) \
            if span["parentSpanId"] in by_id else [span["parentSpanId"]]

    ways = {span["name"]: above(span) for span in spans}
    assert ways["rekindle pull"] == [CALLER]
    assert ways["pull"] == ["rekindle pull", CALLER]
    assert ways["coordinator_open_pull"] == ["pull", "rekindle pull", CALLER]
    for phase in ("resolve", "plan", "allocate", "connect", "transfer", "commit"):
        assert ways[phase] == ["pull", "rekindle pull", CALLER], phase
    assert ways["agent_open_session"] == ["handshake", "transfer", "pull", "rekindle pull", CALLER]
    moved = {span["known"]["rekindle.source"]: span["known"] for span in spans if span["name"] == "source"}
    assert sum(source["rekindle.bytes"] for source in moved.values()) == report["fetched_bytes"]
    assert moved["b"]["rekindle.cap_bytes_per_second"] == 20_000_000 and moved["a"]["rekindle.transport"] == "tcp"


def test_trace_prints_the_spans_of_all_processes_for_perfetto(fleet):
    report = fleet.pull_to("m@1", fleet.directory / "two", "--transport", "tcp")
    pull = fleet.run("trace", report["trace"], "--coordinator", fleet.coordinator)
    events = pull["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"coordinator coordinator", "agent a", "agent b"} < processes and len(processes) == 4
    spans = [event for event in events if event["ph"] == "X"]
    top, = (span for span in spans if span["name"] == "pull")
    assert top["args"]["rekindle.version"] == "m@1"
    for span in spans:
        assert span["ts"] >= 0 and span["dur"] >= 0
    tracks = {}
    for span in spans:
        tracks.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for track in tracks.values():
        for begin, end in track:
            for start, stop in track:
                assert stop <= begin or start >= end or (start >= begin and stop <= end) or (start <= begin and stop >= end)
    # As people copy ids, also with capital letters.
    for word in (top["args"]["rekindle.subject"], report["trace"].upper(), top["args"]["rekindle.subject"].upper()):
        again = fleet.run("trace", word, "--coordinator", fleet.coordinator)
        assert len(again["traceEvents"]) == len(events), word
    for word in (report["trace"].upper(), top["args"]["rekindle.subject"].upper()):
        outcome = fleet.run("explain", "pull", word, "--coordinator", fleet.coordinator)["findings"][0]
        assert outcome["text"].startswith("The pull of m@1 to "), word


def test_explain_names_the_source_that_a_cap_slows(fleet):
    fleet.pull_to("m@1", fleet.directory / "three", "--transport", "tcp")
    findings = fleet.run("explain", "pull", "m@1", "--coordinator", fleet.coordinator)["findings"]
    kinds = [finding["kind"] for finding in findings]
    assert kinds[:3] == ["outcome", "phases", "sources"]
    slow, = (finding for finding in findings if finding["kind"] == "slow_source")
    assert slow["text"].startswith("Source b sent ")
    assert "It may send this pull 20.0 MB/s at most." in slow["text"]
    assert "--max-rate of the agent b" in slow["advice"]


def test_explain_shows_a_pull_that_no_coordinator_opened(fleet):
    fleet.pull_to("m@1", fleet.directory / "served", "--transport", "tcp")
    fleet.run("pull", "m@9", "--to", fleet.directory / "none", "--coordinator", fleet.coordinator, code=3)
    for subject in ("m@9", "m"):
        outcome = fleet.run("explain", "pull", subject, "--coordinator", fleet.coordinator)["findings"][0]["text"]
        assert outcome.startswith("The pull of m@9 to ") and " failed after " in outcome, outcome


def test_explain_shows_a_pull_from_named_agents(fleet):
    """Such a pull asks the coordinator for nothing, and sends it its spans before the command ends."""
    endpoint = fleet.run("status", "--coordinator", fleet.coordinator)["nodes"][0]["address"]
    for count in range(5):
        report = fleet.run("pull", "m@1", "--to", fleet.directory / f"from-{count}", "--from", endpoint,
                           "--coordinator", fleet.coordinator)
        outcome = fleet.run("explain", "pull", report["trace"], "--coordinator", fleet.coordinator)["findings"][0]
        assert outcome["text"].startswith("The pull of m@1 to "), outcome


def test_the_agent_of_this_host_knows_its_publications_without_a_coordinator(fleet):
    fleet.publish("alone@1", fleet.directory / "model.safetensors")
    for coordinator in ((), ("--coordinator", "127.0.0.1:1")):
        done = subprocess.run([BINARY, "trace", "alone@1", "--store", fleet.store("a"), *coordinator],
                              capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
        assert done.returncode == 0, done.stderr
        assert {"publish", "copy", "claim", "commit"} <= {event["name"] for event in json.loads(done.stdout)["traceEvents"]}
    findings = fleet.run("explain", "publication", "alone@1", "--store", fleet.store("a"))["findings"]
    assert findings[0]["text"].startswith("The publication of alone@1 from a took "), findings
    assert findings[1]["text"].startswith("The time went to ")
    # An update is known to the coordinator only, and that it does not answer is the news.
    done = subprocess.run([BINARY, "trace", "nobody@1", "--store", fleet.store("a"), "--coordinator", "127.0.0.1:1"],
                          capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
    assert done.returncode not in (0, 3) and "127.0.0.1:1" in done.stderr


def test_explain_shows_a_pull_of_this_host_that_had_no_coordinator(fleet):
    fleet._daemon("agent", "--listen", "127.0.0.1:0", "--node-id", "lost", "--store", fleet.store("lost"),
                  "--coordinator", "127.0.0.1:1")
    done = subprocess.run([BINARY, "pull", "m@1", "--store", fleet.store("lost"), "--quiet"], capture_output=True,
                          text=True, timeout=PATIENCE_S, env=fleet.environment)
    assert done.returncode != 0
    outcome = fleet.run("explain", "pull", "m@1", "--coordinator", fleet.coordinator,
                        "--store", fleet.store("lost"))["findings"][0]["text"]
    assert outcome.startswith("The pull of m@1 to lost failed after "), outcome


def test_explain_takes_the_pull_that_is_named_from_a_trace_of_several(fleet):
    fleet.environment["TRACEPARENT"] = f"00-{'7' * 32}-{CALLER}-01"
    try:
        for directory in ("first", "second"):
            fleet.pull_to("m@1", fleet.directory / directory, "--transport", "tcp")
    finally:
        del fleet.environment["TRACEPARENT"]
    spans = [event for event in fleet.run("trace", "7" * 32, "--coordinator", fleet.coordinator)["traceEvents"]
             if event["name"] == "pull"]
    first, second = (span["args"]["rekindle.subject"] for span in sorted(spans, key=lambda span: span["ts"]))

    def explained(subject):
        return fleet.run("explain", "pull", subject, "--coordinator", fleet.coordinator)["findings"]

    assert [explained(subject)[0]["kind"] for subject in (first, second)] == ["outcome", "outcome"]
    assert explained(first)[0]["text"] != explained(second)[0]["text"]
    which = explained("7" * 32)
    assert which[0]["kind"] == "which" and which[1]["text"] == explained(second)[0]["text"]
    assert second in which[0]["text"].split("The others:")[0] and first in which[0]["text"].split("The others:")[1]


def test_explain_says_that_a_pull_waited_in_the_queue_before_it_knew_the_checkpoint(fleet):
    directory = fleet.directory / "queue"
    directory.mkdir()

    class Busy(Rekindle):
        def _daemon(self, role, *arguments):
            limit = ("--max-pullers", "1") if role == "coordinator" else ("--max-rate", "20MB")
            return super()._daemon(role, *arguments, *limit)

    busy = Busy(directory)
    try:
        busy.publish("m@1", fleet.directory / "model.safetensors")
        command = [BINARY, "pull", "m@1", "--coordinator", busy.coordinator, "--transport", "tcp", "--quiet", "--to"]
        served = subprocess.Popen([*command, directory / "served"], env=busy.environment)
        eventually(lambda: busy.run("status", "--coordinator", busy.coordinator)["pulls"])
        queued = busy.pull_to("m@1", directory / "queued", "--transport", "tcp")
        assert served.wait(PATIENCE_S) == 0
        findings = busy.run("explain", "pull", queued["trace"], "--coordinator", busy.coordinator)["findings"]
        wait, = (finding["text"] for finding in findings if finding["kind"] == "wait")
        assert " in the queue, " in wait
    finally:
        busy.close()


WORKER = """
import os, sys, time, rekindle
with open(sys.argv[1], "a") as lives:
    print(os.environ["TRACEPARENT"], os.getpid(), file=lives)
with rekindle.attach() as session:
    for _ in session.entries():
        pass
    session.commit(timeout=60)
    time.sleep(600)
"""


def test_the_recoveries_of_a_worker_and_their_pull_are_one_trace(fleet):
    fleet.publish("recovered@1", fleet.directory / "model.safetensors")
    lives = fleet.directory / "lives"
    command = [BINARY, "run", "--model", "recovered@1", "--instance", "chat", "--store", fleet.store("b"), "--",
               sys.executable, "-c", WORKER, lives]
    environment = {**fleet.environment, "TRACEPARENT": f"00-{'8' * 32}-{CALLER}-01"}
    environment["REKINDLE_LIBRARY"] = os.environ["REKINDLE_LIBRARY"]

    def recoveries(count):
        done = subprocess.run([BINARY, "trace", "8" * 32, "--agent", f"unix:{fleet.store('b')}/agent/agent.sock"],
                              capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
        spans = [event for event in json.loads(done.stdout)["traceEvents"] if event["ph"] == "X"] if done.stdout else []
        found = sorted((span for span in spans if span["name"] == "recovery"), key=lambda span: span["ts"])
        return len(found) == count and (found, spans)

    with subprocess.Popen(command, env=environment) as supervisor:
        try:
            (first,), spans = eventually(lambda: recoveries(1))
            pull, = (span for span in spans if span["name"] == "pull")
            assert pull["args"]["parent"] == first["args"]["span"]
            os.kill(int(lives.read_text().split()[-1]), signal.SIGKILL)
            (_, second), spans = eventually(lambda: recoveries(2))
        finally:
            supervisor.terminate()
            supervisor.wait(PATIENCE_S)
    contexts = [line.split()[0].split("-") for line in lives.read_text().splitlines()]
    assert [context[1] for context in contexts] == ["8" * 32] * 2
    assert [span["args"]["parent"] for span in (first, second)] == [context[2] for context in contexts]
    assert len({context[2] for context in contexts} | {CALLER}) == 3
    phases = {span["name"] for span in spans if span["args"].get("parent") == second["args"]["span"]}
    assert {"detect", "restart", "plan", "install"} <= phases and "pull" not in phases
    findings = fleet.run("explain", "recovery", "chat", "--store", fleet.store("b"))["findings"]
    assert findings[0]["kind"] == "which" and findings[1]["text"].startswith("Rank 0 of chat was served recovered@1 again")


def test_a_recovery_that_failed_is_explained_with_its_pull(fleet):
    code = "import rekindle\nrekindle.attach('nothing@1', instance='lost', timeout=20)"
    run_python(code, check=False, REKINDLE_STORE=str(fleet.store("b")), TRACEPARENT="no trace context \udcff")
    findings = fleet.run("explain", "recovery", "lost", "--store", fleet.store("b"))["findings"]
    assert findings[0]["text"].startswith("Rank 0 of lost did not get nothing@1, after ")
    pull, = (finding["text"] for finding in findings if finding["kind"] == "pull")
    assert pull.startswith("The pull of nothing@1 to b failed after ")


def test_a_joint_publication_is_one_trace_over_its_agents(fleet):
    code = """
import sys, numpy, rekindle
rank = int(sys.argv[1])
with rekindle.publisher("joint@1", rank=rank, world=2, agent=sys.argv[2]) as publication:
    publication.add("w", numpy.full((1000, 1000), rank, numpy.float32), shape=(2000, 1000), offset=(1000 * rank, 0))
    publication.commit(60)
"""
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank), fleet.store(name)])
             for rank, name in enumerate("ab")]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0]

    def spans():
        events = fleet.run("trace", "joint@1", "--coordinator", fleet.coordinator)["traceEvents"]
        processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        found = [(processes[event["pid"]], event) for event in events if event["ph"] == "X"]
        return sum(event["name"] == "rank" for _, event in found) == 2 and found

    found = eventually(spans)
    top, = (event["args"]["span"] for process, event in found if event["name"] == "publication")
    for name in ("agent a", "agent b"):
        own = {event["name"]: event["args"] for process, event in found if process == name}
        assert own["share"]["parent"] == top and own["rank"]["parent"] == top
        for part, phases in (("share", {"gather", "plan", "write", "digest", "finish", "claim", "commit", "confirm"}),
                             ("rank", {"gather", "write", "commit"})):
            assert {event["name"] for process, event in found if event["args"].get("parent") == own[part]["span"]} == phases
    assert {process for process, _ in found} == {"agent a", "agent b", "coordinator coordinator"}
    findings = fleet.run("explain", "publication", "joint@1", "--coordinator", fleet.coordinator)["findings"]
    assert findings[0]["text"].startswith("The joint publication of joint@1 took "), findings
    assert findings[0]["text"].endswith(" on 2 host(s).")
    assert "gather" in findings[1]["text"] and "confirm" in findings[1]["text"]


def test_a_node_that_does_not_answer_is_named_and_the_rest_is_printed(fleet):
    report = fleet.pull_to("m@1", fleet.directory / "four", "--transport", "tcp")
    fleet.kill_agent("b")
    done = subprocess.run([BINARY, "trace", report["trace"], "--coordinator", fleet.coordinator],
                          capture_output=True, text=True, timeout=PATIENCE_S, env=fleet.environment)
    assert done.returncode == 0 and "b: " in done.stderr
    processes = {event["args"]["name"] for event in json.loads(done.stdout)["traceEvents"]
                 if event["name"] == "process_name"}
    assert "agent a" in processes and "agent b" not in processes
    fleet.start_agent("b")


def test_an_unknown_operation_is_not_found(fleet):
    for arguments in (("trace", "0" * 31 + "1"), ("explain", "pull", "nobody@1"), ("explain", "update", "m@1")):
        fleet.run(*arguments, "--coordinator", fleet.coordinator, code=3)
    fleet.run("explain", "recovery", "nobody", "--store", fleet.store("a"), code=3)


def test_https_is_refused_and_a_collector_that_is_away_holds_nothing_up(fleet):
    away = ("m@1", "--coordinator", fleet.coordinator)
    fleet.run("pull", *away, "--to", fleet.directory / "five", "--otlp", "https://localhost:4318", code=2)
    fleet.run("pull", *away, "--to", fleet.directory / "five", "--otlp", "http://127.0.0.1:1")
    assert os.path.exists(fleet.directory / "five")
