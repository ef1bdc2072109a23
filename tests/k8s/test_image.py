"""The image, as far as it can be checked without building it: pinned, not root, and what it copies is there."""

import fnmatch
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.k8s.pods import command_line, pods
from tests.k8s.rendering import ALL, K8S, for_each, needs_kubectl, rendered

ROOT = K8S.parent
DOCKERFILE = (K8S / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if word
    ]


def arguments(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def test_every_stage_begins_with_a_pinned_image_or_another_stage() -> None:
    defaults = dict(each.split("=", 1) for each in arguments("ARG"))
    stages: set[str] = set()
    for each in arguments("FROM"):
        match = re.fullmatch(r"(\S+) AS (\S+)", each)
        assert match, each
        image = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], match[1])
        assert image in stages or re.search(r":\d+\.\d+", image), f"{image} is not pinned"
        stages.add(match[2])
    others = re.findall(r"--build-arg BASE=(\S+)", DOCKERFILE)
    assert others
    assert all(re.search(r":\d+\.\d+$", image) for image in others)


def test_packages_are_pinned_and_the_extra_exists() -> None:
    install, sbom = (each for each in arguments("RUN") if "pip install" in each)
    assert "--require-hashes" in install
    for step in (install, sbom):
        assert step.count("uv pip install") == step.count("--constraint constraints.txt") == 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {each.partition("=")[2] for each in arguments("ARG") if each.startswith("EXTRA=")}
    extras.update(re.findall(r"--build-arg EXTRA=(\S+)", DOCKERFILE))
    assert extras == {"sglang", "serve"} <= project["optional-dependencies"].keys()
    pinned = pinned_packages().keys()
    optional = [each for extra in extras for each in project["optional-dependencies"][extra]]
    direct = [*project["dependencies"], *optional]
    assert {re.split(r"[^\w-]", each)[0] for each in direct} - {"ampd"} <= pinned


def pinned_packages(name: str = "constraints.txt") -> dict[str, list[str]]:
    """Package -> the hashes of its files."""
    pinned: dict[str, list[str]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if found := re.match(r"([\w.-]+)==[^ ]+", line):
            hashes = pinned.setdefault(found[1], [])
        elif found := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line):
            hashes.append(found[1])
        else:
            raise AssertionError(line)
    return pinned


@pytest.mark.parametrize("name", ["constraints.txt", "tools/uv.txt"])
def test_every_package_is_pinned_with_the_hashes_of_its_files(name: str) -> None:
    pinned = pinned_packages(name)
    assert pinned
    assert [package for package, hashes in pinned.items() if not hashes] == []


def test_it_does_not_run_as_root() -> None:
    last_stage = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.findall(r"(?m)^USER (.+)$", last_stage) == ["1000:1000"]
    assert not re.search(r"(?m)^USER", DOCKERFILE[: DOCKERFILE.rindex("\nFROM ")])


@needs_kubectl
@for_each(ALL)
def test_pods_run_as_the_user_of_the_image(name: str) -> None:
    for pod in pods(rendered(name)):
        if any(container["image"].startswith("ampd:") for container in pod.containers()):
            assert (pod.spec["securityContext"]["runAsUser"], pod.spec["securityContext"]["runAsGroup"]) == (1000, 1000)


def ignored(path: Path) -> bool:
    """Whether .dockerignore leaves a file out: the last pattern that matches it or a folder above it says so."""
    result = False
    parents = [path, *path.parents][:-1]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if line and not line.startswith("#"):
            names = [each.name if "**/" in line else str(each) for each in parents]
            # `*` is one level: what lies in the root.
            hit = any(fnmatch.fnmatch(name, pattern) for name in names if "/" not in name)
            result = not line.startswith("!") if hit else result
    return result


def test_all_that_is_copied_is_there_and_nothing_else_is_sent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = [source for each in arguments("COPY") if "--from" not in each for source in each.split()[:-1]]
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not ignored(Path(source)), f"{source} is not sent to the build"
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {project["project"]["readme"], *project["project"]["license-files"]} <= set(copied)
    for left_out in (".venv/bin/python", ".git/HEAD", "tests/k8s/test_image.py", "ampd/__pycache__/cli.pyc", "out/x"):
        assert ignored(Path(left_out)), left_out
    for sent in ("ampd/cli/main.py", "ampd/perf/profiles/tiny-cpu.json", "k8s/base/redis/redis.conf"):
        assert not ignored(Path(sent)), sent


def test_the_sbom_gets_the_packages_of_the_last_stage_after_all_are_installed() -> None:
    last = instructions()[max(at for at, (word, _) in enumerate(instructions()) if word == "FROM") :]
    (adding,) = (at for at, (_, rest) in enumerate(last) if "add_system_packages.py /opt/ampd/sbom.cdx.json" in rest)
    assert all(at < adding for at, (_, rest) in enumerate(last) if "apt-get" in rest or rest.startswith("--from=build"))
    source = re.findall(r"--mount=type=bind,source=([^,]+)", last[adding][1])
    assert source == ["tools/add_system_packages.py"]
    assert (ROOT / source[0]).exists()
    assert not ignored(Path(source[0])), "it is not sent to the build"


def test_the_documented_tag_is_the_projects_version() -> None:
    readme = (K8S / "README.md").read_text()
    tags = set(re.findall(r"ampd:(\d[\w.-]*)", DOCKERFILE + readme))
    assert {tag.partition("-")[0] for tag in tags} == {version("ampd")}


def test_manifests_are_installed_whole() -> None:
    """`ampd plan --output-manifest` copies them from the installed package."""
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["k8s"]
    suffixes = {glob.removeprefix("**/*") for glob in globs}
    needed = [path for path in K8S.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    of_a_graph = [path for path in needed if path.suffix not in (".py", ".md") and path.name != "Dockerfile"]
    assert {path.suffix for path in of_a_graph} <= suffixes


@pytest.mark.parametrize("script", sorted(K8S.rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_plain_sh(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)


@pytest.mark.slow
@needs_kubectl
def test_the_download_is_a_command_that_exists() -> None:
    documents = rendered("models")
    (job,) = pods(documents)
    program, command, *words = command_line(job, job.main, documents)
    assert (program, command) == ("hf", "download")
    hf = Path(sys.executable).with_name("hf")
    shown = subprocess.run([hf, "download", "--help"], capture_output=True, text=True, check=True, timeout=120).stdout
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in shown
