"""The documentation builds as a site, and its API reference has every public name."""

import subprocess
import sys
from pathlib import Path

import zeropp
from zeropp import optim, zero

ROOT = Path(__file__).resolve().parent.parent


def test_every_public_name_has_an_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "api/index.html").read_text()
    names = [f"zeropp.{name}" for name in zeropp.__all__ if name not in ("optim", "zero")]
    names += [f"zeropp.optim.{name}" for name in optim.__all__ if name not in zeropp.__all__]
    names += [f"zeropp.zero.{name}" for name in zero.__all__]
    names += ["zeropp.Engine.save_checkpoint", "zeropp.Attached.exact_weights"]
    assert [name for name in names if f'id="{name}"' not in page] == []
    assert "Raises InputError" in page
