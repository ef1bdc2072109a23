"""Ids are unique over calls, threads and processes."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from ampd.unique_id import unique_id


def _ids(number: int) -> list[str]:
    return [unique_id() for _ in range(number)]


def test_ids_have_the_form_of_a_trace_id() -> None:
    assert re.fullmatch("[0-9a-f]{32}", unique_id())


def test_no_id_comes_twice_from_the_threads_of_a_process() -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = [each for some in pool.map(_ids, [2_000] * 8) for each in some]
    assert len(set(ids)) == len(ids) == 16_000


# Tests fork processes (`tests.harness.fork_server`). In a program of its own: a process with threads
# should not fork.
_FORKS = """
import os
from ampd.unique_id import unique_id
unique_id()
children = [os.fork()]
if children[0]:
    children.append(os.fork())
os.write(1, (unique_id() + chr(10)).encode())
if all(children):
    for child in children:
        os.waitpid(child, 0)
"""


def test_a_forked_process_repeats_no_id_of_its_parent_or_of_its_sibling() -> None:
    lines = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=True).stdout.split()
    assert len(set(lines)) == len(lines) == 3
