"""Which instruction set the kernels for CPUs use."""

from zeropp.native.kernels import ISAS, cpu_library


def use_isa(isa: str | None) -> bool:
    """Use an instruction set of `ISAS` from now on; `None`: the best one.

    Returns whether this processor has it; if not, nothing changes. Raises ValueError for other
    names, LibraryError if there is no library.
    """
    return bool(cpu_library().zpp_set_isa(-1 if isa is None else ISAS.index(isa)))
