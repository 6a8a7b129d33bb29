"""Not DeepSpeed: `zeropp.deepspeed` under DeepSpeed's name, with all its modules."""

import importlib
import importlib.metadata
import pkgutil
import sys

_OURS = "+zeropp"
_others = [
    distribution.version
    for distribution in importlib.metadata.distributions(name="deepspeed")
    if not distribution.version.endswith(_OURS)
]
if _others:
    raise ImportError(
        f"DeepSpeed {_others[0]} and zeropp-deepspeed are installed in one environment, and both "
        "provide the module deepspeed: uninstall both, then install the one you want"
    )

_zeropp = importlib.import_module("zeropp.deepspeed")
for _module in pkgutil.walk_packages(_zeropp.__path__, "zeropp.deepspeed."):
    importlib.import_module(_module.name)
for _name in [*sys.modules]:
    if _name.startswith("zeropp.deepspeed."):
        sys.modules[_name.removeprefix("zeropp.")] = sys.modules[_name]
_zeropp.__version__ = importlib.metadata.version("deepspeed")
sys.modules["deepspeed"] = _zeropp
