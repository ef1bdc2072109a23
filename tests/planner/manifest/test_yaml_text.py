"""Text stays text, for readers of YAML 1.1 and 1.2, in Python and in Go."""

import json
from pathlib import Path

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from planner.manifest.files import documents

from .lab import needs_kubectl, read_by_kubectl

TRAPS = [
    *[
        "1e3",
        "1e-05",
        "0x1f",
        "0o17",
        "017",
        "1_000",
        "12:30",
        "1.5",
        ".5",
        ".inf",
        "-.inf",
        ".nan",
        "nan",
        "inf",
        "+1",
    ],
    *["y", "n", "Y", "N", "yes", "No", "on", "Off", "true", "null", "~", "", " ", "-", "--", "- a", "=", "<<", "!x"],
    *["2026-11-21", "2026-11-21T10:00:00Z", "a: b", "a #b", "#a", "*a", "&a", "{a}", "[a]", "'a'", '"a"', "a\\b", "%a"],
    *["--itl=1e-05", "--routing=ampd(alpha=0.8, beta=2)", "redis://u:$(P)@h:1/0", "ü", "a\tb", "a:", "? a", "@a", "`a"],
    *["two\nlines", "two\nlines\n", "ends with blank \nx", "\nstarts", "tab\t\nx", "x\n\n\n", "  indented\nx"],
]
texts = st.one_of(st.sampled_from(TRAPS), st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20))


@given(text=texts, key=texts)
@example(text="1e3", key="1e3")
def test_what_is_written_is_read_again(text: str, key: str) -> None:
    whole = {"first": {key: text, "list": [text, 1, True, None, {"x": text}]}}
    assert list(yaml.safe_load_all(documents([whole, whole]))) == [whole, whole]


@needs_kubectl
def test_gos_reader_takes_every_text_for_a_text(tmp_path: Path) -> None:
    data = {f"k{index}": text for index, text in enumerate(TRAPS)}
    each = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "traps"}, "data": data}
    path = tmp_path / "traps.yaml"
    path.write_text(documents([each]), encoding="utf-8")
    assert read_by_kubectl(path)[0]["data"] == data


def test_nothing_is_shared_by_anchors() -> None:
    shared = {"a": ["x"]}
    text = documents([{"one": shared, "two": shared}])
    assert "&" not in text
    assert "*" not in text
    assert json.dumps(yaml.safe_load(text)) == '{"one": {"a": ["x"]}, "two": {"a": ["x"]}}'


def test_what_people_read_is_not_quoted() -> None:
    text = documents([{"kind": "ConfigMap", "args": ["--routing=predictive", "/etc/ampd/perf"], "file": "{\n}\n"}])
    assert text == "---\nkind: ConfigMap\nargs:\n- --routing=predictive\n- /etc/ampd/perf\nfile: |\n  {\n  }\n"
