"""Break the code in twenty-five places, one at a time, and see a test fail each time.

A test that cannot fail proves nothing. Each line of `BREAKS` names a rule of the product, a change that breaks it, and
the tests that must notice. The change is made in a copy of the repository, never in the repository itself.

    python -m benchmarks.broken_code            # all of them
    python -m benchmarks.broken_code --only queue
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
_COPIED = (
    "ampd", "benchmarks", "docs", "k8s", "planner", "router", "tests", "tools", "workers", "workloads", "pyproject.toml"
)  # fmt: skip
_TIMEOUT_S = 600
_TESTS_FAILED = 1
"""Exit code of pytest. All others mean that it could not run the tests."""


@dataclass(frozen=True, slots=True)
class Break:
    """A change that breaks a rule.

    Attributes:
        rule: what holds no longer.
        old: the text that is replaced. The file has it once.
        tests: files or folders, of which at least one test must fail.
    """

    rule: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Make the change below `root`. Returns the text before.

        Raises:
            ValueError: the file does not have the text exactly once.
        """
        file = root / self.path
        before = file.read_text("utf-8")
        if before.count(self.old) != 1:
            raise ValueError(f"{self.path} has {before.count(self.old)} times, not once: {self.old!r}")
        file.write_text(before.replace(self.old, self.new), "utf-8")
        return before


BREAKS = (
    Break(
        "placement: at least one token of a prompt is computed",
        "ampd/types.py",
        "return min(held_tokens, prompt_tokens - 1)",
        "return min(held_tokens, prompt_tokens)",
        ("tests/ampd/serving/test_placement.py",),
    ),
    Break(
        "placement: a worker is no remote choice for its own session",
        "ampd/serving/placement.py",
        "if view.worker_id != own_id and view.worker_id not in lost",
        "if view.worker_id not in lost",
        ("tests/ampd/serving/test_placement.py",),
    ),
    Break(
        "placement: KV of other weights is not read",
        "ampd/serving/placement.py",
        'view.fingerprint in ("", ours)',
        'view.fingerprint != "-"',
        ("tests/router/test_fingerprints.py",),
    ),
    Break(
        "local only: an option that is not known is not split over two workers",
        "ampd/serving/local_only.py",
        "if value is not None and name not in known), None)",
        "if False), None)",
        ("tests/ampd/serving/test_local_only.py",),
    ),
    Break(
        "passes: what a pass cuts ends with a full page",
        "ampd/serving/pass_sizes.py",
        "return min(pages * self._page_tokens, left_tokens)",
        "return min(tokens, left_tokens)",
        ("tests/ampd/serving/test_pass_sizes.py",),
    ),
    Break(
        "passes: the batch makes a step after it has paused",
        "ampd/serving/pass_sizes.py",
        "return NextPass(0 if has_paused else tokens)",
        "return NextPass(tokens)",
        ("tests/ampd/serving/test_pass_sizes.py",),
    ),
    Break(
        "queue: a pass starts when all its histories are read",
        "ampd/serving/prefill_queue.py",
        "if any(entry.stage is not _READY for entry in picked.members):",
        "if all(entry.stage is not _READY for entry in picked.members):",
        ("tests/ampd/serving/test_prefill_queue.py",),
    ),
    Break(
        "queue: its times are those of the prefills that are here now",
        "ampd/serving/prefill_queue.py",
        "        if left_tokens:\n            self._listed = None\n",
        "        if left_tokens:\n",
        ("tests/ampd/serving/test_prefill_queue.py",),
    ),
    Break(
        "Moore-Hodgson: the job that frees the most time is given up",
        "ampd/policies/moore_hodgson.py",
        "now_s += heappushpop(kept, -time_s)",
        "now_s -= time_s",
        ("tests/ampd/policies/ordering/test_ampd.py",),
    ),
    Break(
        "roles: the last worker that owns sessions keeps its role",
        "ampd/serving/roles.py",
        "if _leaves_an_owner(current, change):",
        "if True:",
        ("tests/ampd/serving/test_roles.py",),
    ),
    Break(
        "admission: sessions in progress come first",
        "ampd/serving/admission.py",
        "        longest_s *= NEW_WAIT_SHARE",
        "        longest_s *= 1.0",
        ("tests/ampd/serving/test_admission.py",),
    ),
    Break(
        "admission: no session begins where a round waits beyond its target",
        "ampd/serving/admission.py",
        "if overdue_s <= 0.0:",
        "if True:",
        ("tests/ampd/serving/test_admission.py",),
    ),
    Break(
        "eviction: dropped tokens leave the next round on time",
        "ampd/serving/kv_eviction.py",
        "key=prefill_s) - 1)",
        "key=prefill_s))",
        ("tests/ampd/serving/test_kv_eviction.py",),
    ),
    Break(
        "keys: tenants have no page in common",
        "ampd/keys.py",
        "    if not tenant:",
        "    if True:",
        ("tests/ampd/test_page_keys.py",),
    ),
    Break(
        "state: a session has one owner",
        "ampd/state/scripts/route.lua",
        "if not holds and epoch <= bound_epoch then",
        "if false then",
        ("tests/ampd/state/test_store.py",),
    ),
    Break(
        "state: a session moves only from the binding that its caller knows",
        "ampd/state/scripts/repin.lua",
        "if bound_epoch >= tonumber(ARGV[2]) then",
        "if false then",
        ("tests/ampd/state/test_store.py",),
    ),
    Break(
        "state: only the leader assigns roles",
        "ampd/state/scripts/assign.lua",
        "if redis.call('GET', KEYS[1]) ~= ARGV[1] then",
        "if false then",
        ("tests/ampd/state/test_store_roles.py",),
    ),
    Break(
        "state: a late view does not bring a done prefill back",
        "ampd/state/known_worker.py",
        "        self._done[task_id] = now_s\n",
        "",
        ("tests/ampd/state/test_known_worker.py", "tests/ampd/state/test_view.py"),
    ),
    Break(
        "calls: a signature holds for one call",
        "ampd/call_signatures.py",
        "return None if self._is_first(found[3], now_s) else SignatureFault.REPEATED",
        "return None",
        ("tests/ampd/test_call_signatures.py",),
    ),
    Break(
        "targets: a client's target has a floor and a cap",
        "router/targets.py",
        "chosen.append(min(max(asked_s, self.floor * default_s), self.cap * default_s))",
        "chosen.append(asked_s)",
        ("tests/router/test_targets.py",),
    ),
    Break(
        "recovery: a request that cannot be split is not continued after its first token",
        "router/request.py",
        "if option := uncarried_option(request):",
        "if option := None:",
        ("tests/router/test_recovery.py",),
    ),
    Break(
        "sessions: a release waits for the running round",
        "workers/session_releaser.py",
        "if use and use.running:\n            use.release = True",
        "if use and False:\n            use.release = True",
        ("tests/workers/test_session_releaser.py",),
    ),
    Break(
        "KV store: heads that several ranks hold are written once",
        "workers/kv/shared.py",
        "return Share(rank // group, 1, rank % group == 0)",
        "return Share(rank // group, 1, True)",
        ("tests/workers/kv/test_geometry.py",),
    ),
    Break(
        "KV store: what a reader leases is not evicted",
        "workers/kv/store/directory.py",
        "lease = _LeasedPages(protects=True, ",
        "lease = _LeasedPages(protects=False, ",
        ("tests/workers/kv/store",),
    ),
)


def _copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)


def _is_noticed(folder: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if ran.returncode not in (0, _TESTS_FAILED):
        raise SystemExit(f"the tests did not run:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ran.returncode == _TESTS_FAILED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the rules that contain this text")
    chosen = [each for each in BREAKS if parser.parse_args().only in each.rule]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _copy(folder)
        if _is_noticed(folder, sorted({test for each in chosen for test in each.tests})):
            raise SystemExit("a test fails already without a change")
        missed = 0
        for number, each in enumerate(chosen, 1):
            before = each.apply(folder)
            noticed = _is_noticed(folder, each.tests)
            (folder / each.path).write_text(before, "utf-8")
            missed += not noticed
            print(f"{number:2} {'noticed' if noticed else 'MISSED '}  {each.rule}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} changes made a test fail")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
