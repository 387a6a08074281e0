"""Metrics by https, as tools/deploy/prometheus/scrape.yml has Prometheus ask for them."""
import json
import re
import subprocess

import pytest
from conftest import BINARY
from dashboard_fleet import ROOT, Prometheus, eventually
from test_metrics import promtool

CONFIGURATION = (ROOT / "tools/deploy/prometheus/scrape.yml").read_text()
PLACE = "/etc/prometheus/rekindle"


@pytest.fixture
def prepared(tmp_path):
    """A directory with the files that Prometheus has, and the certificate of a daemon."""
    authority = tmp_path / "ca"
    for words in (["init", authority], ["issue", authority, "coordinator", "c", "--dns", "localhost"]):
        subprocess.run([BINARY, "certs", *words], check=True, capture_output=True, timeout=20)
    (tmp_path / "ca.crt").write_bytes((authority / "ca.crt").read_bytes())
    (tmp_path / "token").write_text("the token of a prometheus")
    (tmp_path / "token").chmod(0o600)
    return tmp_path


@pytest.fixture
def address(prepared):
    """Of a coordinator whose metrics other hosts reach."""
    certificate = prepared / "ca/coordinator-c.pem"
    words = [BINARY, "coordinator", "--json", "--listen=127.0.0.1:0", f"--state={prepared}/state",
             f"--tls-cert={certificate}", f"--tls-key={certificate}", f"--tls-ca={prepared}/ca/ca.crt",
             "--metrics=0.0.0.0:0", f"--http-token-file={prepared}/own-token"]
    (prepared / "own-token").write_text("the token of a prometheus")
    (prepared / "own-token").chmod(0o600)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["metrics"]
        finally:
            process.kill()


def host_job(prepared, address):
    """The job for hosts without Kubernetes, with this one."""
    job = CONFIGURATION[CONFIGURATION.index("  # Hosts without Kubernetes"):]
    job = re.sub(r"targets: .*", f"targets: [localhost:{address.rsplit(':', 1)[1]}]", job)
    return "scrape_configs:\n" + job.replace(PLACE, str(prepared))


def test_promtool_accepts_the_configuration(prepared):
    configuration = prepared / "prometheus.yml"
    # Debian's promtool does not know Kubernetes.
    text, replaced = re.subn(r"kubernetes_sd_configs:\n +- role: pod\n +namespaces:\n +names: \[rekindle\]\n",
                             "static_configs: [{targets: ['localhost:1']}]\n", CONFIGURATION)
    assert replaced == 2
    configuration.write_text(text.replace(PLACE, str(prepared)))
    promtool("check", "config", configuration)


@pytest.mark.parametrize("token, up", [("the token of a prometheus", 1), ("a token that is another", 0)])
def test_prometheus_scrapes_with_the_right_token_only(prepared, address, token, up):
    (prepared / "token").write_text(token)
    directory = prepared / "prometheus-data"
    directory.mkdir()
    prometheus = Prometheus(directory, host_job(prepared, address))
    try:
        eventually(lambda: prometheus.value("count(up)") == 1)
        eventually(lambda: prometheus.value("sum(up)") == up)
        eventually(lambda: prometheus.value("rekindle_coordinator_leading") == up)
    finally:
        prometheus.close()
