"""The packages of the operating system in the SBOM of an image."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.add_system_packages import components, main, read_release, with_components

UBUNTU = read_release('PRETTY_NAME="Ubuntu 24.04"\nID=ubuntu\nVERSION_ID="24.04"\n# note=x\n\n')
LISTED = (
    "libstdc++6:amd64\t14.2.0-4ubuntu2~24.04\tamd64\tgcc-14\t14.2.0-4ubuntu2~24.04\tinstalled\n"
    "removed\t1.0\tall\tremoved\t1.0\tconfig-files\n"
    "vim\t2:9.1.0016-1ubuntu7+esm1\tamd64\tvim\t2:9.1.0016-1ubuntu7\tinstalled\n"
)
PYTHON: dict[str, Any] = {"type": "library", "bom-ref": "redis==6.4.0", "name": "redis", "version": "6.4.0"}
SBOM = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "components": [PYTHON],
    "dependencies": [{"ref": "redis==6.4.0"}],
}


def test_installed_packages_have_the_names_of_advisories() -> None:
    found = list(components(LISTED, UBUNTU))
    assert [each["purl"] for each in found] == [
        "pkg:deb/ubuntu/libstdc%2B%2B6@14.2.0-4ubuntu2~24.04?arch=amd64&distro=ubuntu-24.04",
        "pkg:deb/ubuntu/vim@2%3A9.1.0016-1ubuntu7%2Besm1?arch=amd64&distro=ubuntu-24.04",
    ]
    assert found[0]["name"] == "libstdc++6"
    assert found[0]["properties"][0] == {"name": "dpkg:source", "value": "gcc-14"}


def test_the_python_packages_stay_and_nothing_is_there_twice() -> None:
    found = list(components(LISTED, UBUNTU))
    once = with_components(SBOM, found)
    assert [each["name"] for each in once["components"]] == ["redis", "libstdc++6", "vim"]
    assert [each["ref"] for each in once["dependencies"]] == ["redis==6.4.0", *(each["purl"] for each in found)]
    assert with_components(once, found) == once


@pytest.mark.skipif(not shutil.which("dpkg-query"), reason="no dpkg-query: not Debian or Ubuntu")
def test_all_packages_of_this_machine_are_added(tmp_path: Path) -> None:
    path = tmp_path / "sbom.cdx.json"
    path.write_text(json.dumps(SBOM))
    script = Path(__file__).parents[2] / "tools" / "add_system_packages.py"
    subprocess.run([sys.executable, "-I", script, path], check=True, capture_output=True)
    listed = subprocess.run(["dpkg", "--get-selections"], check=True, capture_output=True, text=True).stdout
    names = {line.split()[0].partition(":")[0] for line in listed.splitlines() if line.endswith("\tinstall")}
    added = [each for each in json.loads(path.read_text())["components"] if "purl" in each]
    assert {each["name"] for each in added} == names
    assert len(added) >= len(names) > 0
    assert all(each["version"] for each in added)


def test_an_empty_list_is_an_error_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "dpkg-query"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "sbom.cdx.json"
    path.write_text(json.dumps(SBOM))
    assert main([str(path)]) == 1
    assert "no installed package" in capsys.readouterr().err
    assert json.loads(path.read_text()) == SBOM
