"""The report at the end of a run, however it ends; nothing that goes wrong with it ends the run."""

import logging
from pathlib import Path

from megatron_zpp.monitor.report.report import write_report
from megatron_zpp.monitor.report.run_record import JSON_LINES, REPORT
from megatron_zpp.settings.config import LogConfig
from zeropp.errors import InputError

log = logging.getLogger("megatron_zpp")


def report_rows(config: LogConfig) -> list[tuple[str, str]]:
    """Write the report; return a row that says where it is, or why there is none.

    One rank calls it, after the writers are closed.
    """
    if config.tensorboard_dir is None:
        return []
    try:
        return [("report", str(write_report(Path(config.tensorboard_dir))))]
    except (InputError, OSError) as error:
        return [("report", f"none: {error}")]
    except Exception:
        log.warning("the report could not be made", exc_info=True)
        return []


def report_after_failure(config: LogConfig) -> list[tuple[str, str]]:
    """Write the report of a run that a signal or an error ended, if it recorded anything new."""
    if config.tensorboard_dir is None:
        return []
    folder = Path(config.tensorboard_dir)
    recorded, report = folder / JSON_LINES, folder / REPORT
    if not recorded.exists() or not recorded.stat().st_size:
        return []
    if report.exists() and report.stat().st_mtime >= recorded.stat().st_mtime:
        return []
    return report_rows(config)
