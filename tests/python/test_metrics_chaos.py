"""All daemons are scraped while sources and pullers are killed: what is counted stays right."""
import random
import threading
import time
import urllib.error

import numpy
import pytest
import safetensors.numpy
from conftest import PATIENCE_S, Rekindle, eventually
from test_metrics import Scrape

ROUNDS = 8


class Watched(Rekindle):
    """Three agents with metrics, whose pulls of the model take some tenths of a second."""

    def __init__(self, directory):
        self.scrapers = {}
        super().__init__(directory)
        self.start_agent("c")

    def _daemon(self, role, *arguments):
        more = ("--max-rate", "200MB") if role == "agent" else ()
        started = super()._daemon(role, *arguments, "--metrics", "127.0.0.1:0", *more)
        address = self.ready[-1]["metrics"]
        name = arguments[arguments.index("--node-id") + 1] if role == "agent" else role
        self.scrapers[address] = Scraper(name, address)
        return started

    def current(self, name):
        """The newest life of a daemon."""
        return [scraper for scraper in self.scrapers.values() if scraper.name == name][-1]


class Scraper(threading.Thread):
    """Scrapes one life of a daemon until it ends. Notes what has gone back."""

    def __init__(self, name, address):
        super().__init__(daemon=True)
        self.name, self.address, self.went_back, self.scrapes = name, address, [], 0
        self.last, self.stopped = None, threading.Event()
        self.start()

    def look(self):
        scrape = Scrape(self.address)
        if self.last:
            self.went_back += [(key, value, scrape.samples.get(key)) for key, value in self.last.counts()
                               if scrape.samples.get(key, -1) < value]
        self.last = scrape
        self.scrapes += 1

    def run(self):
        while not self.stopped.wait(0.02):
            try:
                self.look()
            except (OSError, urllib.error.URLError):
                return  # its life is over


@pytest.fixture(scope="module")
def seed():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return seed


def test_counts_stay_right_while_daemons_are_killed(memory_directory, seed):
    rng = random.Random(seed)
    source = memory_directory / "model.safetensors"
    tensors = {f"layer.{i}": numpy.random.default_rng(seed + i).random((1024, 1500 + i), dtype=numpy.float32)
               for i in range(8)}
    safetensors.numpy.save_file(tensors, source)
    payload = sum(tensor.nbytes for tensor in tensors.values())
    directory = memory_directory / "chaos"
    directory.mkdir()
    fleet = Watched(directory)
    commands = []

    def succeeds(*arguments):
        """The command, until it does what it should: its agent or its sources may be away."""
        def tried():
            commands.append(arguments)
            try:
                return fleet.run(*arguments)
            except AssertionError:
                return None
        return eventually(tried)

    def pull(version, name):
        succeeds("pull", f"m@{version}", "--store", fleet.store(name), "--transport", "tcp")

    def started_again(name):
        """A command that finds no agent opens the store itself, until it has ended."""
        try:
            fleet.start_agent(name)
        except AssertionError as why:
            if "is in use by process" not in str(why):
                raise
            return False
        return True

    try:
        killed = 0
        for version in range(1, ROUNDS + 1):
            succeeds("publish", f"m@{version}", source, "--store", fleet.store("a"))
            pullers = [threading.Thread(target=pull, args=(version, name)) for name in ("b", "c")]
            for puller in pullers:
                puller.start()
            time.sleep(rng.uniform(0, 0.25))
            # The newest version is on `a` alone as long as nobody has pulled it.
            victim = rng.choice(["a", "c"])
            fleet.kill_agent(victim)
            killed += 1
            eventually(lambda: started_again(victim))
            for puller in pullers:
                puller.join(2 * PATIENCE_S)
                assert not puller.is_alive()
        b, coordinator = fleet.current("b"), fleet.current("coordinator")
        eventually(lambda: coordinator.last("rekindle_fleet_held_bytes") == 3 * ROUNDS * payload)

        # In a quiet fleet all sides have counted the same bytes.
        before = {name: Scrape(fleet.current(name).address) for name in ("a", "b", "c")}
        succeeds("publish", "m@100", source, "--store", fleet.store("a"))
        pull(100, "b")
        after = {name: Scrape(fleet.current(name).address) for name in ("a", "b", "c")}
        served = sum(after[name].sum("rekindle_served_bytes_total") - before[name].sum("rekindle_served_bytes_total")
                     for name in ("a", "c"))
        moved = [after[name].sum("rekindle_pull_moved_bytes_total") - before[name].sum("rekindle_pull_moved_bytes_total")
                 for name in ("a", "b", "c")]
        assert served == payload and moved == [0, payload, 0]

        for scraper in fleet.scrapers.values():
            scraper.stopped.set()
        for scraper in fleet.scrapers.values():
            scraper.join(PATIENCE_S)
            assert not scraper.is_alive() and scraper.went_back == [], scraper.name
        assert len(fleet.scrapers) == 4 + killed and b.scrapes > ROUNDS

        b.look()
        assert b.went_back == []
        counted = b.last
        # b has lived on. It has got each version once, and from a source that died it got some bytes in vain.
        vain = counted("rekindle_pull_refetched_bytes_total") + payload * (
            counted("rekindle_pull_lost_sources_total") + counted.sum("rekindle_pulls_total") -
            counted("rekindle_pulls_total", result="ok"))
        got = counted.sum("rekindle_pull_moved_bytes_total")
        assert (ROUNDS + 1) * payload <= got <= (ROUNDS + 1) * payload + vain
        assert counted("rekindle_pulls_total", result="ok") == ROUNDS + 1
        assert counted("rekindle_pulls_started_total") == counted.sum("rekindle_pulls_total") == sum(
            command[0] == "pull" and command[3] == fleet.store("b") for command in commands)
        assert counted("rekindle_copies_bytes", state="verified") == (ROUNDS + 1) * payload
    finally:
        for scraper in fleet.scrapers.values():
            scraper.stopped.set()
        fleet.close()
