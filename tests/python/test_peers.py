"""tools/bench/peers: its report, its arguments, and its own ends; no wheel of another system is needed."""
import hashlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest
import safetensors.numpy
from conftest import PATIENCE_S, ROOT

PROGRAM = ROOT / "tools/bench/peers"
sys.path.insert(0, str(PROGRAM.parent))
from peer_report import Key, Row, Sample, ratio, svg, table, to_json  # noqa: E402


def load_program():
    loader = importlib.machinery.SourceFileLoader("peers", str(PROGRAM))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("peers", loader))
    sys.modules["peers"] = module
    loader.exec_module(module)
    return module


peers = load_program()
CONDITIONS = [("CPU", "Some <CPU> & more"), ("rounds", "3")]


def rows():
    """1 GB in so many seconds."""
    def row(key, *seconds):
        return Row(key, 10**9, [Sample(one, one / 2) for one in seconds])

    return [row(Key("tcp", "Rekindle", "warm"), 0.5, 0.25, 1.0),
            row(Key("tcp", "Other", "warm"), 1.0, 1.0, 1.0),
            Row(Key("gpu", "GPU <system>", "warm"), 10**9, reason="needs a GPU: there is none", needs_gpu=True),
            row(Key("memory", "Alone", "cold"), 0.1)]


def test_a_row_has_the_median_and_the_spread_of_its_rounds():
    lines = {line.split("  ")[0]: line.split() for line in table(rows(), CONDITIONS).splitlines()}
    assert lines["Rekindle"] == ["Rekindle", "warm", "no", "2.00", "1.00–4.00", "0.25", "1.00"]
    assert lines["Alone"] == ["Alone", "cold", "no", "10.00", "10.00–10.00", "0.05", "-"]
    assert " ".join(lines["GPU <system>"]).endswith("needs a GPU: there is none")


def test_warm_rows_come_before_cold_ones():
    keys = [Key("memory", "A", "cold"), Key("tcp", "B", "cold"), Key("tcp", "C", "warm"), Key("memory", "D", "warm")]
    made = to_json([Row(key, 1) for key in keys], [])["rows"]
    assert [row["system"] for row in made] == ["C", "B", "D", "A"]


def test_the_ratio_is_the_median_of_the_ratios_of_one_round():
    made = rows()
    assert ratio(made[1], made) == 0.5  # of 0.5, 0.25 and 1
    assert ratio(made[2], made) is None and ratio(made[3], made) is None


def test_the_table_and_the_json_have_the_conditions():
    assert "CPU: Some <CPU> & more\nrounds: 3\n" in table(rows(), CONDITIONS)
    found = json.loads(json.dumps(to_json(rows(), CONDITIONS)))
    assert found["conditions"] == dict(CONDITIONS)
    first = found["rows"][0]
    assert (first["gb_per_second"], first["lowest"], first["highest"]) == (2.0, 1.0, 4.0)
    assert [row["needs_gpu"] for row in found["rows"]] == [False, False, False, True]


def test_the_picture_is_well_formed_and_has_everything():
    picture = xml.etree.ElementTree.fromstring(svg(rows(), CONDITIONS))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in picture.iter(f"{space}text")]
    assert "CPU: Some <CPU> & more; rounds: 3" in texts
    assert "needs a GPU: there is none" in texts and "GPU <system>, warm" in texts
    bars = [bar for bar in picture.iter(f"{space}rect") if bar.get("class") != "paper"]
    assert [bar.get("class") for bar in bars] == ["rekindle", "peer", "peer"]
    assert all(float(bar.get("x")) + float(bar.get("width")) <= float(picture.get("width")) for bar in bars)
    assert "prefers-color-scheme: dark" in picture.find(f"{space}style").text


def test_a_report_without_figures_is_a_report():
    none = [Row(Key("tcp", "Other", "warm"), 1, reason="it cannot run")]
    assert "it cannot run" in table(none, [])
    xml.etree.ElementTree.fromstring(svg(none, []))


@pytest.mark.parametrize("arguments, text", [
    (["--size", "100M"], "no multiple of 64M"), (["--size", "much"], "no multiple of 64M"),
    (["--rounds", "0"], "no number from 1 to 1000"), (["--only", "pigeons"], "pigeons"),
    (["--nonsense"], "--nonsense")])
def test_a_wrong_argument_is_one_line(arguments, text):
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and text in done.stderr and done.stderr.startswith("peers: ")


def test_a_command_that_is_none_is_one_line():
    done = subprocess.run([PROGRAM, "--rekindle", "/nowhere/rekindle", "--size", "64M"], capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "peers: --rekindle '/nowhere/rekindle' is no program\n"


@pytest.fixture
def run(tmp_path):
    made = peers.Run(rekindle="", size=3 << 20, rounds=1, streams=2, cores=2, directory=tmp_path, torch=None)
    made.digests = peers.write_checkpoint(made.file, made.size)
    return made


def test_the_checkpoint_has_the_size_that_was_asked_for(run):
    assert run.file.stat().st_size == run.size
    assert hashlib.sha256(run.file.read_bytes()).hexdigest() == run.digests["file"] == peers.file_digest(run.file)
    tensors = safetensors.numpy.load_file(run.file)
    joined = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    assert hashlib.sha256(joined).hexdigest() == run.digests["tensors"] == peers.tensor_digest(run.directory)


def plain_sockets():
    return next(way for way in peers.all_ways() if way.name == "sockets")


def test_a_source_and_a_reader_move_the_bytes_warm_and_cold(run):
    way = plain_sockets()
    found = way.measure(run, True)
    assert list(found) == way.keys
    assert all(one.seconds > 0 and one.cpu_seconds >= 0 for one in found.values())


def test_bytes_that_differ_are_a_failure(run):
    run.digests["file"] = "0" * 64
    (warm, cold) = peers.measure_all(run, [plain_sockets()], {})
    assert warm.reason == cold.reason == "the bytes that arrived differ from the source's"
    assert not warm.needs_gpu


def test_a_process_that_ends_gives_its_last_words(run):
    child = peers.Child(run, "talker", [sys.executable, "-c", "import sys; sys.exit('no luck')"])
    with pytest.raises(peers.Failure, match="talker ended with 1: no luck"):
        child.line()
    child.close()


def test_a_process_that_says_nothing_is_ended(run):
    run.deadline_s = 0.2
    child = peers.Child(run, "sleeper", [sys.executable, "-c", "import time; time.sleep(1000)"])
    with pytest.raises(peers.Failure, match="sleeper gave no answer in 0 s"):
        child.line()
    child.close()
    assert child.process.returncode is not None
