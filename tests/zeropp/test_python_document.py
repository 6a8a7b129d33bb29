"""Every statement of docs/python.md runs as printed, in the order of the document."""

import os
import re

import zeropp
from tests.documents import ROOT
from tests.ranks import ranks


@ranks(2)
def test_every_python_block_runs(tmp_path):
    os.chdir(tmp_path)
    text = (ROOT / "docs/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    first, saving, copying, sharding, alone, updating, building, gathering = blocks
    names = {"__name__": "__main__"}
    exec(first, names)
    steps = 64 // 2 // 8  # samples, ranks, samples of a step
    assert names["engine"].global_steps == steps
    exec(saving, names)
    assert names["client_state"] == {"epoch": 3}
    exec(copying, names)
    assert type(names["average"]) is names["Net"]
    exec(gathering, names)
    with zeropp.zero.GatheredParameters(names["model"].head.weight):
        assert names["model"].head.weight.abs().sum() == 0
    exec(sharding, names)
    sharded = names["model"]
    exec(alone, names)
    assert names["steps"].count == 64 // 8 and names["steps"].local.is_alike
    names["model"] = sharded
    exec(updating, names)
    assert type(names["optimizer"]) is zeropp.FusedAdam
    exec(building, names)
    assert type(names["model"]) is names["Net"]
    names.clear()  # FSDP2 keeps a model's class, and so the variables of its methods
