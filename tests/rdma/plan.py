"""Between ctest and tests/rdma/run: which tests there are, and what came of them.

plan.py plan DIR CTEST-ARGUMENTS…: one directory for each test that `ctest CTEST-ARGUMENTS` would run, in DIR,
with `command` (a bash script) and `limit` (seconds). guest/suite adds `output`, `status` and `seconds`.

plan.py report DIR XML no-skips|skips: writes JUnit as ctest does and prints what failed. With no-skips a
skipped test failed. Exit 1 when something failed, or nothing ran.
"""

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as tree
from pathlib import Path

DEFAULT_LIMIT = 120


def as_list(value):
    return value if isinstance(value, list) else [value]


def plan(directory, arguments):
    listing = subprocess.run(
        ["ctest", *arguments, "--show-only=json-v1"], check=True, stdout=subprocess.PIPE, text=True
    )
    tests = json.loads(listing.stdout)["tests"]
    if not tests:
        sys.exit("rdma: ctest has no such test")
    for number, test in enumerate(tests):
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        here = directory / f"{number:04}"
        here.mkdir(parents=True)
        (here / "name").write_text(test["name"])
        (here / "limit").write_text(str(int(properties.get("TIMEOUT", DEFAULT_LIMIT))))
        skips = {"code": properties.get("SKIP_RETURN_CODE"),
                 "patterns": as_list(properties.get("SKIP_REGULAR_EXPRESSION", []))}
        (here / "skips").write_text(json.dumps(skips))
        lines = [f"cd {shlex.quote(properties['WORKING_DIRECTORY'])} || exit 125"] \
            if "WORKING_DIRECTORY" in properties else []
        lines += [f"export {shlex.quote(v)}" for v in as_list(properties.get("ENVIRONMENT", []))]
        if "command" in test:
            lines.append("exec " + shlex.join(test["command"]))
        else:
            lines.append("echo 'it is not built' >&2; exit 125")
        (here / "command").write_text("\n".join(lines) + "\n")
    print(f"rdma: {len(tests)} tests")


class Outcome:
    def __init__(self, directory, skips_fail):
        self.name = (directory / "name").read_text().strip()
        output = directory / "output"
        self.output = output.read_text(errors="replace") if output.exists() else ""
        seconds = directory / "seconds"
        self.seconds = seconds.read_text().strip() if seconds.exists() else "0"
        self.again = (directory / "again").exists()
        self.failure, self.skip = self.judge(directory, skips_fail)

    def judge(self, directory, skips_fail):
        """(why it failed, why it was skipped); both None when it passed."""
        status = directory / "status"
        if not status.exists() or not status.read_text().strip():
            begun = (directory / "begun").exists()
            again = " twice" if self.again else ""
            return (f"the machine died under it{again}" if begun else "it did not run", None)
        status = int(status.read_text())
        skips = json.loads((directory / "skips").read_text())
        skip = None
        if skips["code"] is not None and status == int(skips["code"]):
            skip = f"SKIP_RETURN_CODE={status}"
        elif any(re.search(pattern, self.output) for pattern in skips["patterns"]):
            skip = "SKIP_REGULAR_EXPRESSION_MATCHED"
        if skip and skips_fail:
            return ("it was skipped, although all that tests ask for is here", None)
        if skip:
            return (None, skip)
        if status == 0:
            return (None, None)
        limit = (directory / "limit").read_text()
        return (f"ended after its {limit} s" if status in (124, 137) else f"exit status {status}", None)

    def junit(self):
        case = tree.Element("testcase", name=self.name, classname=self.name, time=self.seconds)
        if self.failure:
            case.set("status", "fail")
            tree.SubElement(case, "failure", message=self.failure)
        elif self.skip:
            case.set("status", "notrun")
            tree.SubElement(case, "skipped", message=self.skip)
        else:
            case.set("status", "run")
        # What XML cannot hold is left out.
        text = re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "", self.output)
        tree.SubElement(case, "system-out").text = text
        return case


def report(directory, xml, skips_fail):
    outcomes = [Outcome(d, skips_fail) for d in sorted(directory.iterdir()) if d.is_dir()]
    failed = [o for o in outcomes if o.failure]
    skipped = [o for o in outcomes if o.skip]
    suite = tree.Element("testsuite", name="rdma", tests=str(len(outcomes)),
                         failures=str(len(failed)), skipped=str(len(skipped)))
    suite.extend(o.junit() for o in outcomes)
    xml.parent.mkdir(parents=True, exist_ok=True)
    tree.ElementTree(suite).write(xml, encoding="utf-8", xml_declaration=True)
    for outcome in failed:
        print(f"\n=== {outcome.name}: {outcome.failure}\n{outcome.output}")
    passed = len(outcomes) - len(failed) - len(skipped)
    print(f"rdma: {passed} passed, {len(failed)} failed, {len(skipped)} skipped ({xml})")
    for outcome in outcomes:
        if outcome.failure:
            print(f"  failed: {outcome.name}")
        elif outcome.again:
            print(f"  tried twice, since a machine died under it: {outcome.name}")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        plan(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(report(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "no-skips"))
