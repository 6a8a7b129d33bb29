"""What benchmarks share that draw with matplotlib, which is optional."""

import importlib.util
import io
from pathlib import Path

from zeropp.atomic import write_atomically
from zeropp.errors import InputError

DOTS_PER_INCH = 130


def require_matplotlib(path: Path) -> None:
    """Raise InputError, before anything runs, if --plot cannot write a picture to `path`."""
    if path.suffix != ".png":
        raise InputError(f"--plot {path}: expected a name that ends with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install matplotlib")


def save_png(figure, path: Path) -> None:
    """Write a matplotlib figure atomically as PNG."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    write_atomically(path, lambda file: file.write(picture.getvalue()))


def hide_top_and_right(axes) -> None:
    """Leave only the left and bottom border of matplotlib axes."""
    axes.spines[["top", "right"]].set_visible(False)
