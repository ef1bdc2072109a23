"""Where manifests are written: both forms, earlier ones, and what is not ours."""

import re
from pathlib import Path

import pytest
import yaml

from ampd.errors import UserError
from planner.layout.layout import Layout
from planner.manifest.files import MARK, check_target, write_manifest
from tests.k8s.pods import UNKNOWN_SECRET, environment, pods

from .lab import K8S, built, by_identity, components, main, needs_kubectl, objects_of, read_by_kubectl


@pytest.mark.parametrize("name", ["plan.yaml", "plan.yml", "PLAN.YAML"])
def test_a_yaml_path_becomes_one_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    check_target(path)
    write_manifest(path, objects_of(), ["said at the head"])
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"{MARK}.\n# said at the head\n---\n")
    assert list(yaml.safe_load_all(text)) == objects_of()
    assert [item.name for item in tmp_path.iterdir()] == [name]


def test_a_line_of_the_head_cannot_leave_its_comment(tmp_path: Path) -> None:
    for name in ("plan.yaml", "plan"):
        write_manifest(tmp_path / name, objects_of(), ["a model\nkind: Other"])
    for path in (tmp_path / "plan.yaml", tmp_path / "plan" / "kustomization.yaml"):
        assert "\n# a model kind: Other\n" in path.read_text(encoding="utf-8")


@needs_kubectl
def test_kubectl_reads_the_file_as_it_is_meant(tmp_path: Path) -> None:
    write_manifest(tmp_path / "plan.yaml", objects_of(annotations={"ampd.dev/rate": "1e3"}), [])
    assert read_by_kubectl(tmp_path / "plan.yaml") == objects_of(annotations={"ampd.dev/rate": "1e3"})


@pytest.mark.slow
@needs_kubectl
def test_a_folder_gives_the_same_objects(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    check_target(folder)
    write_manifest(folder, objects_of(), ["said at the head"])
    assert by_identity(built(folder)) == by_identity(objects_of())
    assert len(built(folder)) == len(objects_of())
    for file in folder.iterdir():
        assert file.read_text(encoding="utf-8").startswith(MARK)


@pytest.mark.slow
@needs_kubectl
@pytest.mark.parametrize(
    "component", ["components/rdma", "components/redis-tls", "components/external-redis", "monitoring"]
)
def test_components_can_be_put_on_top(component: str, tmp_path: Path) -> None:
    write_manifest(tmp_path / "plan", objects_of(), [])
    (tmp_path / "k8s").symlink_to(K8S)
    top = tmp_path / "mine"
    top.mkdir()
    kustomization = {
        "resources": ["../plan"],
        "components": [f"../k8s/{component}"],
        "images": [{"name": "ampd", "newName": "registry.example/ampd"}],
    }
    (top / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = built(top)
    assert objects != built(tmp_path / "plan")
    graph = components(objects)
    assert list(graph) == list(components(objects_of()))
    assert main(graph["decode-tp8"])["image"].startswith("registry.example/ampd:")
    workers = ("prefill-tp2", "prefill-tp4", "decode-tp1", "decode-tp8")
    for name in workers if component.endswith("rdma") else ():
        assert main(graph[name])["resources"]["limits"]["rdma/ib"]
        assert main(graph[name])["resources"]["limits"]["nvidia.com/gpu"] == name.rpartition("tp")[2]
    for pod in pods(objects) if "redis" in component else ():
        if pod.name in ("coordinator", *workers):
            url = environment(pod, pod.main, objects)["AMPD_STATE_URL"]
            assert url.startswith("rediss://") if component.endswith("tls") else url == UNKNOWN_SECRET


@pytest.mark.slow
@needs_kubectl
def test_an_earlier_manifest_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder, file = tmp_path / "plan", tmp_path / "plan.yaml"
    for path in (folder, file):
        extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "no-longer-needed"}, "data": {}}
        write_manifest(path, [*objects_of(), extra], [])
        changed = objects_of(layout=Layout(((1, 1),), ((2, 2),)))
        check_target(path)
        write_manifest(path, changed, [])
    assert by_identity(built(folder)) == by_identity(changed)
    assert list(yaml.safe_load_all(file.read_text())) == changed
    assert not [item for item in folder.iterdir() if "no-longer-needed" in item.name]


def refused(path: Path, words: str) -> None:
    with pytest.raises(UserError) as error:
        check_target(path)
    assert "\n" not in str(error.value)
    assert re.search(words, str(error.value)), error.value
    with pytest.raises(UserError):
        write_manifest(path, objects_of(), [])


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("kind: Pod\n")
    refused(mine, r"mine\.yaml exists and is no earlier manifest")
    assert mine.read_text() == "kind: Pod\n"
    folder = tmp_path / "folder"
    write_manifest(folder, objects_of(), [])
    (folder / "notes.txt").write_text("mine")
    before = {item.name: item.read_text() for item in folder.iterdir()}
    refused(folder, r"folder holds notes\.txt, which is not part of an earlier manifest")
    assert {item.name: item.read_text() for item in folder.iterdir()} == before
    (folder / "notes.txt").unlink()
    (folder / "sub").mkdir()
    refused(folder, r"folder holds sub")


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "missing" / "plan.yaml", r"missing/plan\.yaml cannot be written: .*No such file")
    refused(tmp_path / "missing" / "plan", r"missing/plan cannot be written: .*No such file")
    refused(Path("/proc/plan.yaml"), r"/proc/plan\.yaml cannot be written")
    (tmp_path / "folder.yaml").mkdir()
    refused(tmp_path / "folder.yaml", r"folder\.yaml is a folder")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r"file is a file; end its name in \.yaml")
    refused(tmp_path / "file" / "plan.yaml", r"cannot be written: .*Not a directory")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    write_manifest(tmp_path, objects_of(), [])
    assert (tmp_path / "kustomization.yaml").is_file()
