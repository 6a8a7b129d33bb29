"""Draws the report of a run again: of one that was killed, or that ran without matplotlib.

    megatron-zpp report runs/pretrain

The folder is the --tensorboard-dir of a run, or one that contains it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.commands.run_command import require_writable, run_command
from megatron_zpp.monitor.report.report import write_report
from megatron_zpp.monitor.report.run_record import JSON_LINES
from megatron_zpp.settings.flag import Section, flag
from zeropp.errors import InputError

USAGE = """\
usage: {program} FOLDER [--output FILE.html]

Draws the report of a run from what it recorded in FOLDER, its --tensorboard-dir, or in a folder of
FOLDER."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Section):
    """Which run, and where its report goes"""

    input: str | None = flag(None, "the folder; --input may be left out", required=True)
    output: str | None = flag(None, "the page (default: report.html beside the curves)")


def main(argv: Sequence[str], program: str = "megatron-zpp report") -> int:
    """Run the command; return the exit status."""
    if argv and not argv[0].startswith("-"):
        argv = ["--input", *argv]
    return run_command(argv, USAGE.format(program=program), (ReportConfig,), _run)


def find_curves(folder: Path) -> Path:
    """Return the TensorBoard folder of the run in `folder`; raises InputError unless it is one."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    if (folder / JSON_LINES).is_file():
        return folder
    found = sorted(path.parent for path in folder.glob(f"*/{JSON_LINES}"))
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise InputError(f"{folder} has several runs: name one of {names}")
    return found[0] if found else folder


def _run(config: ReportConfig) -> None:
    if config.output is not None:
        require_writable(config.output, "--output")
    output = Path(config.output) if config.output else None
    print(write_report(find_curves(Path(config.input)), output))
