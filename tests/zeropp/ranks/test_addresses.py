"""Where gloo will listen: by its variable, by the host name, or else on the loopback interface."""

import socket

import pytest
import torch.distributed as dist

from zeropp.ranks import addresses
from zeropp.ranks.addresses import LOOPBACK, gloo_addresses, list_interfaces


def resolves_to(*ips: str):
    def getaddrinfo(name: str, port: object, *, type: int) -> list:
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, type, 0, "", (ip, 0)) for ip in ips
        ]

    return getaddrinfo


@pytest.mark.parametrize(
    ("ips", "expected", "reason"),
    [
        (["127.0.1.1"], "127.0.1.1", "to which its host name node7 resolves"),
        (["198.51.100.7", "127.0.0.3"], "127.0.0.3", "to which its host name node7 resolves"),
        (["198.51.100.7"], LOOPBACK, "resolves to 198.51.100.7, which it does not have"),
    ],
)
def test_the_first_address_of_the_host_name_that_the_machine_has(
    ips, expected, reason, monkeypatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getaddrinfo", resolves_to(*ips))
    (address,) = gloo_addresses(None)
    assert address.ip == expected and reason in address.reason and address.is_loopback


def test_a_host_name_without_an_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.invalid")
    (address,) = gloo_addresses("")
    assert address.ip == LOOPBACK and "node7.invalid resolves to no address" in address.reason


@pytest.mark.skipif(not list_interfaces(), reason="the interfaces of this system are not known")
def test_addresses_of_the_link_alone_come_last(monkeypatch, tmp_path):
    table = tmp_path / "if_inet6"
    lines = ("fe80" + 27 * "0" + "1 01 40 20 80 lo", "fd00" + 27 * "0" + "1 01 40 00 80 lo")
    table.write_text("\n".join(lines))
    monkeypatch.setattr(addresses, "IPV6_ADDRESSES", table)
    assert list_interfaces()["lo"] == [LOOPBACK, "fd00::1", "fe80::1%lo"]


@pytest.mark.skipif(not list_interfaces(), reason="the interfaces of this system are not known")
def test_interfaces_are_those_that_gloo_accepts():
    (address,) = gloo_addresses("lo")
    assert address.ip == LOOPBACK and address.is_loopback and address.reason == "interface lo"
    for name, ips in list_interfaces().items():
        if ips:
            dist.ProcessGroupGloo.create_device(interface=name)
        else:
            with pytest.raises(RuntimeError):
                dist.ProcessGroupGloo.create_device(interface=name)
