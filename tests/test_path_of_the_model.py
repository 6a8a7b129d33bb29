"""How straight the way of a model through `zeropp.shard` is."""

import json
import re

from tests.launched import TORCHRUN, launching, wait_for
from tests.path_of_the_model import counts, without_loops

# These numbers only go down.
STOPS, RETURNS = 18, 3


def test_a_loop_counts_once() -> None:
    assert without_loops("aabcbcbcd") == [*"abcd"]
    assert without_loops("abcabcab") == [*"abcab"]
    assert without_loops("aabab" * 3) == [*"ab"]


def test_a_return_is_a_touch_by_a_function_that_was_left() -> None:
    found = counts([*"abcba"])
    assert (found["stops"], found["returns"]) == (3, 2)


def test_a_model_stops_at_few_functions_and_returns_to_fewer(tmp_path):
    with launching(tmp_path) as launch:
        script = ["--nproc-per-node", "2", "-m", "tests.path_of_the_model"]
        process, log = launch([*TORCHRUN, *script])
        wait_for('"way": ', log, process)
        process.wait(timeout=60)
    (line,) = re.findall(r'^\{"stops".*', log.read_text(), re.M)
    found = json.loads(line)
    assert "zeropp/fsdp_adapter/units.py: shard_unit" in found["way"]
    assert found["stops"] <= STOPS and found["returns"] <= RETURNS, found
