"""`python -m benchmarks.policies`: which policies carry the highest session rate, and how ours does under stress."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field

from ampd.documents import check_writable
from ampd.errors import UserError, guarded
from ampd.settings import Settings, parse_settings
from benchmarks import markdown_table, result_files
from benchmarks.policies.campaign import Ledger, search_all
from benchmarks.policies.contest import USUAL, Contestant
from benchmarks.policies.contestants import ABLATION, ALL, OUR_PARTS, OURS, REFERENCES, named
from benchmarks.policies.plots import write_plots
from benchmarks.policies.prepared import Prepared
from benchmarks.policies.report import tables
from benchmarks.policies.settings import Setting, paper_settings, real_settings
from benchmarks.policies.standings import Groups, Standings
from benchmarks.policies.studies import PLACES, STUDIES, Bench, study
from planner.parallel import in_parallel

PROG = "python -m benchmarks.policies"
_GROUPS = ("paper", "planned", "real")


class ContestSettings(Settings):
    """Search the highest session rate that every contestant carries in every setting, and compare."""

    settings: str = Field("paper,planned,real", description="Groups of settings, comma-separated.")
    only: str | None = Field(None, description="Only settings whose names contain one of these, comma-separated.")
    contestants: str | None = Field(None, description="Labels, comma-separated, ours always included; default: all.")
    study: str | None = Field(
        None, description=f"Instead of the contest, comma-separated: {', '.join(STUDIES)}; or `all`."
    )
    seeds: int = Field(5, ge=1, le=100, description="Seeds of arrivals and lengths.")
    race: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Contestants below this share of the best in the first seed get no further ones.",
    )
    duration: float | None = Field(None, gt=0, description="Seconds of arrivals, for a short try.")
    jobs: int | None = Field(None, ge=1, description="Processes; default: one per core.")
    data: Path | None = Field(None, description="JSON lines of results; what it has already is not made again.")
    again: str | None = Field(
        None, description="Contestants, comma-separated, whose results in --data are made again; `ours` with ablation."
    )
    cache: Path | None = Field(None, description="Folder for layouts and fitted tables; default: in the user's cache.")
    write: Path | None = Field(None, description="Folder for the tables as CSV files; default: print them.")
    page: Path | None = Field(None, description="Write the page of plots to this HTML file.")


def run(argv: Sequence[str]) -> int:
    """Compare and report.

    Raises:
        UserError: wrong flags, an unknown name, a folder that does not exist, a data file of something else.
    """
    options = parse_settings(ContestSettings, argv, PROG)
    contestants = _contestants(options.contestants)
    studies = _studies(options.study)
    check_writable(options.data, options.page)
    result_files.check_folder(options.write)
    prepared = Prepared(options.cache or _default_cache())
    jobs = options.jobs or os.cpu_count() or 1
    ledger = Ledger(options.data, _again(options.again))
    if studies:
        for found in _run_studies(options, studies, contestants, ledger, prepared, jobs):
            _put(options, "study", found, argv)
        return 0
    groups = _settings(options, prepared, jobs)
    settings = list(dict.fromkeys(setting for group in groups.values() for setting in group))
    in_parallel(partial(prepare, prepared, contestants), settings, "preparing", jobs)
    pairs = [(setting, contestant, USUAL) for setting in settings for contestant in contestants]
    search_all(ledger, pairs, options.seeds, prepared, jobs, options.race)
    standings = Standings(ledger, settings, contestants, options.seeds)
    _put(options, "contest", tables(standings, groups), argv)
    if options.page:
        write_plots(options.page, standings, groups)
    return 0


def _default_cache() -> Path:
    """A folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ampd" / "policies"


def prepare(prepared: Prepared, contestants: Sequence[Contestant], setting: Setting) -> None:
    """Know the setting's rate, and its table if somebody needs one."""
    prepared.reference_rate(setting)
    if any(contestant.is_fitted for contestant in contestants):
        prepared.table(setting)


def _run_studies(
    options: ContestSettings,
    studies: Sequence[str],
    contestants: Sequence[Contestant],
    ledger: Ledger,
    prepared: Prepared,
    jobs: int,
) -> Iterator[dict[str, str]]:
    settings = [setting for setting in paper_settings() if (setting.model, setting.trace) in PLACES]
    settings = _chosen(options, settings)
    rivals = [contestant for contestant in contestants if contestant not in (*OUR_PARTS, *REFERENCES)]
    in_parallel(partial(prepare, prepared, rivals), settings, "preparing", jobs)
    bench = Bench(ledger, settings, options.seeds, prepared, jobs)
    for name in studies:
        yield study(name, bench, rivals)


def _put(options: ContestSettings, name: str, found: Mapping[str, str], argv: Sequence[str]) -> None:
    if options.write:
        result_files.write(options.write, name, found, shlex.join([*PROG.split(), *argv]))
    else:
        print(markdown_table.titled(found), end="\n\n")


def _contestants(text: str | None) -> list[Contestant]:
    if text is None:
        return list(ALL)
    chosen = named(_labels(text), "--contestants")
    return list(dict.fromkeys((OURS, *chosen)))


def _again(text: str | None) -> frozenset[str]:
    labels = {each.label for each in named(_labels(text or ""), "--again")}
    return frozenset(labels | {each.label for each in ABLATION} if OURS.label in labels else labels)


def _labels(text: str) -> list[str]:
    return [label.strip() for label in text.split(",") if label.strip()]


def _studies(text: str | None) -> list[str]:
    if text is None:
        return []
    names = list(STUDIES) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STUDIES:
            raise UserError(f"--study: unknown study {name!r}; known: {', '.join(STUDIES)}")
    return names


def _settings(options: ContestSettings, prepared: Prepared, jobs: int) -> Groups:
    names = [name.strip() for name in options.settings.split(",")]
    groups: Groups = {}
    for name in names:
        if name not in _GROUPS:
            raise UserError(f"--settings: unknown group {name!r}; known: {', '.join(_GROUPS)}")
        chosen = _chosen(options, list(real_settings() if name == "real" else paper_settings()))
        groups[name] = in_parallel(prepared.planned, chosen, "planning", jobs) if name == "planned" else chosen
    if not any(groups.values()):
        raise UserError(f"--only: no setting's name contains {options.only!r}")
    return {name: settings for name, settings in groups.items() if settings}


def _chosen(options: ContestSettings, settings: Sequence[Setting]) -> list[Setting]:
    parts = [part.strip() for part in options.only.split(",")] if options.only else [""]
    chosen = [setting for setting in settings if any(part in setting.name for part in parts)]
    return [replace(each, duration_s=options.duration) for each in chosen] if options.duration else chosen


if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
