"""Tables that are files of a package."""

import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(package: str, name: str) -> dict[str, Any]:
    """Return the contents of the file `name` in the folder of `package`."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text("utf-8"))
