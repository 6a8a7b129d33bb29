"""A limit on the size of files, which stands for the end of a disk: the system refuses a write."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes; not for longer than a test's own work.

    pytest writes its report between a test and the end of its fixtures, perhaps to a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
