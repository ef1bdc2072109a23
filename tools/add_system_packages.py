"""Adds the packages of the operating system to the SBOM of an image: `python3 -I add_system_packages.py SBOM`.

It runs while the image is built, by the system's own Python, and needs nothing but `dpkg-query`. What is in the image
without a package (files that a base image has from elsewhere) is in no list, and so not in the SBOM.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

_INSTALLED = "installed"
_FIELDS = ("binary:Package", "Version", "Architecture", "source:Package", "source:Version", "db:Status-Status")
_QUERY = ("dpkg-query", "--show", "--showformat", "\\t".join(f"${{{field}}}" for field in _FIELDS) + "\\n")


def main(argv: Sequence[str], release_file: Path = Path("/etc/os-release")) -> int:
    """Rewrite the SBOM with the packages of this machine."""
    (path,) = map(Path, argv)
    listed = subprocess.run(_QUERY, capture_output=True, text=True, check=True).stdout
    packages = list(components(listed, read_release(release_file.read_text(encoding="utf-8"))))
    if not packages:
        print("add_system_packages: dpkg-query lists no installed package", file=sys.stderr)
        return 1
    sbom = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(with_components(sbom, packages), indent=2) + "\n", encoding="utf-8")
    print(f"{len(packages)} packages of the operating system added to {path}")
    return 0


def read_release(text: str) -> dict[str, str]:
    """The variables of an os-release file."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value.strip("\"'") for name, sign, value in pairs if sign and not name.startswith("#")}


def components(listed: str, release: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """A component of CycloneDX for each installed package.

    Args:
        listed: what `dpkg-query` wrote.
        release: of the operating system. Advisories are made per distribution and release.
    """
    vendor = release.get("ID", "debian")
    distro = f"{vendor}-{release['VERSION_ID']}" if "VERSION_ID" in release else vendor
    for line in listed.splitlines():
        name, version, architecture, source, source_version, status = line.split("\t")
        if status != _INSTALLED:
            continue
        name = name.partition(":")[0]  # of a foreign architecture: NAME:ARCHITECTURE
        qualifiers = f"arch={architecture}&distro={quote(distro, safe='')}"
        purl = f"pkg:deb/{vendor}/{_quoted(name)}@{_quoted(version)}?{qualifiers}"
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            # Advisories name source packages.
            "properties": [
                {"name": "dpkg:source", "value": source},
                {"name": "dpkg:source-version", "value": source_version},
            ],
        }


def with_components(sbom: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An SBOM with further components, each once: a second call changes nothing."""
    known = {each.get("bom-ref") for each in sbom.get("components", ())}
    new = [each for each in added if each["bom-ref"] not in known]
    return {
        **sbom,
        "components": [*sbom.get("components", ()), *new],
        "dependencies": [*sbom.get("dependencies", ()), *({"ref": each["bom-ref"]} for each in new)],
    }


def _quoted(text: str) -> str:
    return quote(text, safe="~")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
