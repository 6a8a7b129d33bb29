"""tools/plot_losses.py draws the curves of a run."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_both_curves_are_drawn_to_scale(tmp_path):
    records = [
        {"iteration": 0, "validation_loss": 9.0},
        {"iteration": 10, "lm_loss": 7.0},
        {"iteration": 20, "lm_loss": 5.0},
        {"iteration": 20, "validation_loss": 5.0},
    ]
    metrics, drawing = tmp_path / "metrics.jsonl", tmp_path / "out.svg"
    metrics.write_text("\n".join(map(json.dumps, records)))
    command = [sys.executable, str(ROOT / "tools/plot_losses.py"), str(metrics), str(drawing)]
    subprocess.run(command, check=True, env={"PYTHONPATH": str(ROOT)})
    lines = ElementTree.parse(drawing).getroot().findall(f"{SVG}polyline")
    training, held_out = (
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        for line in lines
    )
    assert training[-1] == held_out[-1] and held_out[0][1] < training[0][1] < training[1][1]
    assert training[0][0] * 2 == held_out[0][0] + held_out[1][0]  # halfway
