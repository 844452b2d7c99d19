"""Reports on disk: which one is meant, and its files."""

from __future__ import annotations

from pathlib import Path

from lapclip.errors import RunError
from lapclip.report.comparison_report import comparison_report, comparison_sections, read_comparison
from lapclip.report.document import Report
from lapclip.report.evaluation_report import evaluation_sections
from lapclip.report.gained_report import gained_sections
from lapclip.report.markdown import to_markdown
from lapclip.report.page import to_html
from lapclip.report.run_report import run_report
from lapclip.runs.folder import RUNS, all_runs, find_run
from lapclip.runs.view import view_of


def write_report(name: str | None, out: Path | None) -> tuple[list[Path], list[str]]:
    """Report on a run, the newest if not named, or on a saved comparison where there is no run.

    Returns the files, and warnings for the person who asked.
    """
    saved, warning = read_comparison()
    warnings = [warning] if warning else []
    if name is None and not all_runs():
        if saved is None:
            raise RunError(f"There are no runs in {RUNS.absolute()} and no saved comparison.", hint="lapclip train")
        # Not report.md: this may be the folder of somebody's own work.
        return write_files(comparison_report(saved), out or Path(), "lapclip-comparison"), warnings
    run = find_run(name)
    if not run.events.exists() and not run.settings.exists():
        raise RunError(f"{run.path} is not a run: it has no events.jsonl.", hint="lapclip runs")
    sections = [*gained_sections(run.gained), *evaluation_sections(run.path)]
    sections += [*(comparison_sections(saved) if saved else [])]
    return write_files(run_report(view_of(run), sections), out or run.path, "report"), warnings


def write_files(report: Report, folder: Path, name: str) -> list[Path]:
    """A report as a page and as Markdown."""
    files = {folder / f"{name}.html": to_html(report), folder / f"{name}.md": to_markdown(report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"Cannot write to {folder}: {error.strerror or error}.", hint="lapclip report --out FOLDER"
        ) from error
    return list(files)
