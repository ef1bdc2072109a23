"""The page of models says what the code tries and refuses: degrees, page sizes, arguments and messages."""

import ast
import re
from pathlib import Path

import pytest

from workers.engines.sglang_settings import _REFUSED
from workers.kv.ranks import pools
from workers.kv.shared import TRIED_DEGREES, TRIED_PAGE_TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
POOLS = {
    "Llama": "MHATokenToKVPool",
    "Qwen3-Next": "HybridLinearKVPool",
    "Qwen3": "MHATokenToKVPool",
    "Mixtral": "MHATokenToKVPool",
    "DeepSeek-V3": "MLATokenToKVPool",
    "Gemma 4": "SWAKVPool",
    "gpt-oss": "SWAKVPool",
}
PLACEHOLDER = r"\b(?:CLASS|MODEL|N|BUFFER|LAYOUT|NAME|SECTION)\b"


def rows(header: str) -> list[list[str]]:
    """The cells of the table below a header row that begins like this."""
    table = PAGE.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def messages_of(text: str) -> set[str]:
    """What stands in code in the last column of the tables, with `*` for each placeholder."""
    return {re.sub(PLACEHOLDER, "*", found) for found in re.findall(r"\| `(the KV [^`]*|KV [^`]*)` \|$", text, re.M)}


def raised_messages() -> set[str]:
    """The same of the code that reads SGLang's pools."""
    tree = ast.parse(Path(pools.__file__).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            message = node.exc.args[0]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            found.add("".join(part.value if isinstance(part, ast.Constant) else "*" for part in parts))  # type: ignore[misc]
    return {message for message in found if re.match(r"(the )?KV ", message)}


def test_the_degrees_that_run_are_those_of_the_table() -> None:
    tried: dict[str, set[int]] = {}
    degrees: set[int] = set()
    for model, pairs, *_ in rows("model"):
        if not pairs.startswith("the same"):
            degrees = {
                int(number) for pair in re.findall(r"[\d, ]+ x [\d, ]+", pairs) for number in re.findall(r"\d+", pair)
            }
        name = next(name for name in POOLS if model.startswith(name))
        tried.setdefault(POOLS[name], set()).update(degrees)
    assert tried == {pool: set(degrees) for pool, degrees in TRIED_DEGREES.items()}


def test_the_page_sizes_that_run_are_named() -> None:
    *sizes, last = TRIED_PAGE_TOKENS
    assert f"a page size other than {', '.join(map(str, sizes))} and {last} |" in section("What was not tried")


@pytest.mark.parametrize("message", sorted(m for m in raised_messages() if "never tried" in m))
def test_an_example_of_each_message_about_what_was_not_tried(message: str) -> None:
    pattern = ".*".join(map(re.escape, message.removesuffix("; *").split("*")))
    assert any(re.fullmatch(pattern, found) for found in messages_of(section("What was not tried"))), message


def test_the_messages_about_pools_are_those_of_the_code() -> None:
    assert messages_of(section("Refused")) == {message for message in raised_messages() if "never tried" not in message}


def test_the_arguments_that_are_refused_are_those_of_the_code() -> None:
    table = section("Refused").split("A degree that does not fit", 1)[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named == set(_REFUSED)
