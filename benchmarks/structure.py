"""Measures the size of the product: what a newcomer has to understand.

    python -m benchmarks.structure [--root FOLDER]

prints one JSON object. Lines of code are neither blank, nor comment, nor documentation. Pages are the Markdown files.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("ampd", "planner", "router", "workers", "workloads")
_PAGES = ("README.md", "docs/*.md", "k8s/README.md", "benchmarks/README.md")
_FLAG = "| `--"
"""How the row of a flag begins in `docs/configuration.md`, which is made from the code."""


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python module of the product with its syntax tree."""
    for package in PRODUCT:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root), ast.parse(path.read_text("utf-8"))


def measured(root: Path) -> dict[str, int]:
    """The figures of a source tree."""
    sources = list(modules(root))
    pages = [path.read_text("utf-8") for pattern in _PAGES for path in sorted(root.glob(pattern))]
    configuration = (root / "docs/configuration.md").read_text("utf-8").splitlines()
    return {
        "lines_of_code": sum(_code_lines((root / path).read_text("utf-8"), tree) for path, tree in sources),
        "modules": len(sources),
        "flags": sum(line.startswith(_FLAG) for line in configuration),
        "words_of_pages": sum(len(page.split()) for page in pages),
    }


def _code_lines(text: str, tree: ast.Module) -> int:
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    return len({number for number, line in lines.items() if line and not line.startswith("#")} - texts)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.structure", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path())
    print(json.dumps(measured(parser.parse_args().root), indent=1))


if __name__ == "__main__":
    main()
