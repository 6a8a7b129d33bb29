"""How straight the ways of a model and of a configuration through the build of a run are."""

import json
import re

from tests.launched import TORCHRUN, launching, wait_for
from tests.paths_of_the_build import counts, without_loops

# These numbers only go down.
LIMITS = {"model": (16, 2), "configuration": (22, 2)}  # stops, returns


def test_a_loop_counts_once() -> None:
    assert without_loops("aabcbcbcd") == [*"abcd"]
    assert without_loops("abcabcab") == [*"abcab"]
    assert without_loops("aabab" * 3) == [*"ab"]


def test_a_return_is_a_touch_by_a_function_that_was_left() -> None:
    found = counts([*"abcba"])
    assert (found["stops"], found["returns"]) == (3, 2)


def test_model_and_configuration_take_straight_ways(tmp_path):
    with launching(tmp_path) as launch:
        script = ["--nproc-per-node", "2", "-m", "tests.paths_of_the_build"]
        process, log = launch([*TORCHRUN, *script])
        wait_for('"paths": ', log, process)
        process.wait(timeout=60)
    (line,) = re.findall(r'^\{"paths".*', log.read_text(), re.M)
    paths = json.loads(line)["paths"]
    assert "zeropp/fsdp_adapter/units.py: shard_unit" in paths["model"]["way"]
    assert "megatron_zpp/model/gpt.py: GPT.__init__" in paths["configuration"]["way"]
    for name, (stops, returns) in LIMITS.items():
        found = paths[name]
        assert found["stops"] <= stops and found["returns"] <= returns, found
