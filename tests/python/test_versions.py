"""The version stands in CMakeLists.txt. Everything that repeats it agrees, and it is above that of the previous release."""
import re
import subprocess

import pytest
from conftest import BINARY, PATIENCE_S, ROOT

import rekindle

VERSION = re.search(r"project\(rekindle VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())[1]


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_the_command_and_the_package_have_the_version():
    said = subprocess.run([BINARY, "--version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert said.stdout.strip() == f"rekindle {VERSION}"
    assert rekindle.__version__ == VERSION


@pytest.mark.parametrize("pattern, text", [
    ("tools/deploy/helm/Chart.yaml", r'^(?:appVersion|version): "?([0-9.]+)'),
    ("tools/deploy/kubernetes/**/kustomization.yaml", r'newTag: "([0-9.]+)"'),
    ("tools/deploy/**/*Dockerfile", r"rekindle:(\d[0-9.]+)"),
    ("docs/guides/*.md", r"(?:rekindle[:-]|newTag: \")(\d+\.\d+\.\d+)"),
    ("docs/changelog.md", r"\A# Changelog.*?^## ([0-9.]+)"),
])
def test_files_that_repeat_the_version_agree(pattern, text):
    found = {(str(path.relative_to(ROOT)), version) for path in ROOT.glob(pattern)
             for version in re.findall(text, path.read_text(), re.MULTILINE | re.DOTALL)}
    assert found and {version for _, version in found} == {VERSION}, found


def test_the_previous_release_is_older_and_has_its_section_in_the_changelog():
    previous, = re.findall(r"^[0-9a-f]{40} (\S+)$", (ROOT / "tests/upgrade/previous").read_text(), re.MULTILINE)
    assert numbers(previous) < numbers(VERSION)
    assert re.search(rf"^## {re.escape(previous)}\b", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)
