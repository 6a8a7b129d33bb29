"""Charts of benchmarks as PNG, by matplotlib, which is optional."""

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zeropp.atomic import write_atomically
from zeropp.errors import InputError

DOTS_PER_INCH = 130


def require_matplotlib(path: Path) -> None:
    """Raise InputError, before anything runs, if --plot cannot write a picture to `path`."""
    if path.suffix != ".png":
        raise InputError(f"--plot {path}: expected a name that ends with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install matplotlib")


@contextmanager
def chart(
    path: Path, size: tuple[float, float], columns: int = 1, rows: int = 1, **settings: object
) -> Iterator[tuple[Any, Any]]:
    """Yield a matplotlib figure of `size` inches and its panels, and write the figure atomically.

    `settings` are those of `Figure.subplots`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **settings).flatten()
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    yield figure, panels
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    write_atomically(path, lambda file: file.write(picture.getvalue()))
