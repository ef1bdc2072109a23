"""Objects as YAML that all readers understand alike: text that could be read as another type is quoted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

_PLAIN = re.compile(r"(?:/|--)?[A-Za-z][A-Za-z_./:=, -]*[A-Za-z0-9_./-]*")
"""Words that no reader parses as a number, a date or a truth value; without one-letter words (`y`, `n`)."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None
    if "\n" in text:
        style = "|"
    elif len(text) < 2 or not _PLAIN.fullmatch(text):
        # Readers of YAML 1.1 and 1.2 disagree about 1e3, 0o7, 12:30 and others: PyYAML would leave 1e3 plain.
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def documents(objects: Iterable[dict[str, Any]]) -> str:
    """The objects as YAML documents, with keys in the given order."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, explicit_start=True)
