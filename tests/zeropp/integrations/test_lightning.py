"""Lightning's Trainer with FSDP2 on CPUs, with and without ZeRO++."""

import os

import pytest

from tests.ranks import ranks

PLAIN = {"zero_optimization": {"stage": 3}, "zeropp": {"ranks_per_node": 1}}
ZERO = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2, timeout=120)
def test_unquantized_it_learns_the_same_and_with_zeropp_it_sends_less(accumulation, tmp_path):
    from tests.zeropp.integrations.lightning_run import ZeroppCallback, losses

    os.chdir(tmp_path)
    expected = losses(tmp_path, accumulation)
    plain, quantized = ZeroppCallback(PLAIN), ZeroppCallback(PLAIN | {"zero_optimization": ZERO})
    assert losses(tmp_path, accumulation, plain) == pytest.approx(expected, rel=1e-6)
    assert losses(tmp_path, accumulation, quantized)[0] == pytest.approx(expected[0], rel=5e-3)
    sent = [sum(each.attached.traffic.sent.values()) for each in (quantized, plain)]
    assert 2 * sent[0] < sent[1]


@ranks(2, ranks_per_node=1, timeout=120)
def test_a_node_has_the_trainers_devices_unless_the_json_says_otherwise(tmp_path):
    from tests.zeropp.integrations.lightning_run import ZeroppCallback, losses

    os.chdir(tmp_path)
    for config, nodes in ((PLAIN, "2 of 1 ranks"), ({"zero_optimization": ZERO}, "1 of 2 ranks")):
        callback = ZeroppCallback(config)
        losses(tmp_path, 1, callback)
        assert dict(callback.attached.describe(1))["nodes"].startswith(nodes)
