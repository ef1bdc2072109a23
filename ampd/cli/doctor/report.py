"""The report of `ampd doctor`: a table, a JSON object, and a file for a bug report. None has a password in it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from ampd.cli.doctor.finding import Finding, worst

# Up to the last @: a password may have one itself, or a slash.
_CREDENTIALS = re.compile(r"(?<=://)[^\s\"']*@")
_SECRET = re.compile(
    r"(?i)((?:password|passwd|secret|token|api[_-]?key|authorization)[\"']?\s*[=:]\s*[\"']?(?:bearer\s+)?)[^\s\"',}]+"
)
_WIDTH = 120
_HEAD = "# Report of `ampd doctor`"


@dataclass(frozen=True, slots=True)
class Report:
    """All findings in the order of the checks, and the reading of each check."""

    findings: Sequence[Finding]
    readings: Mapping[str, Any]

    def table(self, width: int = _WIDTH) -> str:
        """One row per finding, with its fix below; `width`: of the lines, in characters."""
        name_width = max(len(finding.check) for finding in self.findings)
        margin = " " * (9 + name_width + 2)
        lines = []
        for finding in self.findings:
            lines += wrap(f"{finding.verdict:<7}  {finding.check:<{name_width}}  {finding.found}", width, margin)
            lines += wrap(f"{margin}fix: {finding.fix}", width, f"{margin}     ") if finding.fix else []
        return redacted("\n".join(lines))

    def to_json(self) -> str:
        """One object: `verdict`, `findings` (check, verdict, found, fix) and `readings` by check."""
        findings = [asdict(finding) for finding in self.findings]
        readings = {name: _plain(reading) for name, reading in self.readings.items()}
        document = {"verdict": worst(self.findings), "findings": findings, "readings": readings}
        return json.dumps(_without_secrets(document), indent=1)

    def attachment(self, logs: Mapping[str, str]) -> str:
        """The file for a bug report, in Markdown.

        Args:
            logs: name -> the end of a log.
        """
        parts = [_HEAD, f"```\n{self.table()}\n```", "## What was read", f"```json\n{self.to_json()}\n```"]
        for name, text in logs.items():
            parts += [f"## The end of {name}.log", f"```\n{redacted(text)}\n```"]
        return "\n\n".join(parts) + "\n"


def wrap(line: str, width: int, margin: str) -> list[str]:
    """The line in pieces of at most `width` characters; those after the first begin with `margin`."""
    return textwrap.wrap(
        line,
        max(width, 60),
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def redacted(text: str) -> str:
    """The text without user and password of URLs, and without values that are named as secrets."""
    return _SECRET.sub(r"\1...", _CREDENTIALS.sub("...@", text))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _without_secrets(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(inner) for inner in value]
    return value
