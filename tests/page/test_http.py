"""The status page's server, without a browser."""
import http.client
import json
import socket
import subprocess

import pytest

from fleet import BINARY, Fleet, eventually


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    running = Fleet(tmp_path_factory.mktemp("page"))
    running.crowd(3)
    yield running
    running.close()


def ask(fleet, path, method="GET", **headers):
    connection = http.client.HTTPConnection(fleet.http, timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.mark.parametrize("path, kind", [("/", "text/html"), ("/style.css", "text/css"), ("/app.js", "text/javascript")])
def test_each_file_has_its_type_and_is_closed_to_other_sites(served, path, kind):
    answer, body = ask(served, path)
    assert answer.status == 200 and body
    assert answer.getheader("Content-Type").startswith(kind)
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    policy = answer.getheader("Content-Security-Policy")
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert answer.getheader("Access-Control-Allow-Origin") is None


def test_the_fleet_is_json_with_every_host(served):
    answer, body = ask(served, "/api/v1/fleet")
    fleet = json.loads(body)
    assert answer.status == 200 and fleet["leading"] is True
    assert [node["id"] for node in fleet["nodes"]] == ["host-0000", "host-0001", "host-0002"]
    assert fleet["versions"][0]["id"] == "qwen3@41" and fleet["versions"][0]["whole_copies"] == 3
    assert fleet["nodes"][0]["copies"] == [[0, 1.0, 1]] and fleet["nodes"][0]["domain"] == "r00"


def test_an_answer_that_a_client_has_is_not_sent_again(served):
    def settled():
        first, _ = ask(served, "/api/v1/fleet")
        again, body = ask(served, "/api/v1/fleet", If_None_Match=first.getheader("ETag"))
        return again.status == 304 and body == b""
    eventually(settled)
    other, body = ask(served, "/api/v1/fleet", If_None_Match='"another"')
    assert other.status == 200 and body


def test_head_has_the_length_and_no_body(served):
    whole, body = ask(served, "/app.js")
    head, nothing = ask(served, "/app.js", "HEAD")
    assert head.status == 200 and nothing == b""
    assert int(head.getheader("Content-Length")) == len(body) == int(whole.getheader("Content-Length"))


@pytest.mark.parametrize("path", ["/nothing", "/../etc/passwd", "/api/v1/", "/api/v1/nodes", "/api/v1/pulls/",
                                  "/api/v1/pulls/zz", "/%2e%2e/x"])
def test_what_is_not_there_is_404_in_one_line(served, path):
    answer, body = ask(served, path)
    assert answer.status == 404
    assert json.loads(body)["error"] and body.count(b"\n") == 1


def test_a_pull_that_does_not_run_is_null(served):
    answer, body = ask(served, "/api/v1/pulls/" + "0" * 32)
    assert answer.status == 200 and json.loads(body) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(served, method):
    answer, _ = ask(served, "/api/v1/fleet", method)
    assert answer.status == 405


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example"])
def test_another_sites_name_is_refused(served, host):
    answer, body = ask(served, "/api/v1/fleet", Host=host)
    assert answer.status == 421 and host.split(":")[0] in json.loads(body)["error"]


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1", "[::1]", "[::1]:7380", "10.1.2.3:7380"])
def test_numbers_and_this_host_are_accepted(served, host):
    assert ask(served, "/api/v1/fleet", Host=host)[0].status == 200


def test_events_come_in_order_after_a_number(served):
    def settled():
        told = json.loads(ask(served, "/api/v1/events?after=0")[1])
        kinds = [event["kind"] for event in told["events"]]
        return kinds.count("node_joined") == 3 and "version_ready" in kinds and told
    everything = eventually(settled)
    numbers = [event["number"] for event in everything["events"]]
    assert numbers == list(range(1, everything["last_event"] + 1))
    kinds = [event["kind"] for event in everything["events"]]
    assert kinds[0] == "coordinator_leads" and kinds.index("version_published") < kinds.index("version_ready")
    later = json.loads(ask(served, f"/api/v1/events?after={numbers[-2]}")[1])
    assert [event["number"] for event in later["events"]] == numbers[-1:]
    assert json.loads(ask(served, "/api/v1/events?after=nonsense")[1])["events"][0]["number"] == 1


MOST_CONNECTIONS = 64


def is_closed(connection):
    connection.settimeout(30)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # Closed with bytes that nobody had read.
        return True


def test_clients_that_say_nothing_keep_nobody_out(served):
    host, port = served.http.rsplit(":", 1)
    idle = [socket.create_connection((host, int(port))) for _ in range(MOST_CONNECTIONS)]
    idle[0].sendall(b"GET /api/v1/fl")
    assert ask(served, "/api/v1/fleet")[0].status == 200
    # The first one at once, the others at the deadline.
    for connection in idle:
        assert is_closed(connection)
        connection.close()


def test_agents_events_reach_the_coordinator_and_the_command(fleet):
    fleet.crowd(0, "talker", "says")
    def told():
        lines = fleet.run("events", "--fleet", "--coordinator", fleet.coordinator).splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == "committed"]
    event, = eventually(told)
    assert event["node"] == "talker" and event["phases"] == [["says", 1000]]


def test_listening_beyond_this_host_is_said(fleet):
    _, ready = fleet.daemon("coordinator", "--listen", "127.0.0.1:0", "--state", fleet.directory / "open",
                            "--http", "0.0.0.0:0", "--http-open")
    logs = "".join(path.read_text() for path in fleet.directory.glob("coordinator-*.log"))
    assert logs.count("http.no_rights") == 1 and ready["http"].startswith("0.0.0.0:")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_coordinator_that_stands_by_says_who_leads(fleet, directory):
    client, peer, http_port = free_port(), free_port(), free_port()
    urls = f"http://127.0.0.1:{client}"
    own = f"http://127.0.0.1:{peer}"
    fleet.processes.append(subprocess.Popen(
        ["etcd", "--data-dir", directory / "etcd", "--listen-client-urls", urls, "--advertise-client-urls", urls,
         "--listen-peer-urls", own, "--initial-advertise-peer-urls", own, "--initial-cluster", f"default={own}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    leader, _ = fleet.daemon("coordinator", "--listen", "127.0.0.1:0", "--etcd", urls, "--etcd-ttl", "2s")
    fleet.processes.append(subprocess.Popen(
        [BINARY, "coordinator", "--listen", "127.0.0.1:0", "--etcd", urls, "--etcd-ttl", "2s", "--http", str(http_port)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=fleet.environment))
    fleet.http = f"127.0.0.1:{http_port}"

    def answer():
        try:
            return json.loads(ask(fleet, "/api/v1/fleet")[1])
        except OSError:
            return {}
    said = eventually(lambda: "leads" in answer().get("why", "") and answer())
    assert said["leading"] is False and f"pid {leader.pid} " in said["why"]
    assert ask(fleet, "/api/v1/events?after=0")[0].status == 503
    leader.kill()
    eventually(lambda: answer().get("leading"))
