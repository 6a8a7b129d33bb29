"""Bytes of messages, rearranged so that an entropy coder makes the most of them.

A Huffman code takes at least one bit for a byte. So symbols that have less to say are packed into
bytes first, none of them into two.

Differences: n bytes, four symbols to a byte, then all differences that have no symbol of their own.
Symbol 0 says that a byte is what the receiver holds, 1 that it is one more, 2 one less, modulo 256,
3 that its difference is among the others. Byte i has the symbols of bytes i, i + n/4, i + n/2 and
i + 3n/4, the first in the lowest bits; the others follow in the order of these bytes.

Codes of three bits: the three bytes of eight codes become four bytes, of two codes each.

The functions in PyTorch define both; where csrc/ was compiled, its kernels do the same.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from zeropp.native.kernels import cpu_library
from zeropp.native.library import LibraryError

SHIFTS = (0, 2, 4, 6)  # of the four symbols in a byte
OTHER = 3  # the symbol of a difference that has none of its own
THREES, FOURS = 3, 4  # bytes of eight codes, packed and spread


def differences(row: Tensor, held: Tensor) -> Tensor:
    """`row` and what is held of it, uint8 (n,) with n a multiple of 4 -> their differences (m,).

    There are n/4 <= m <= 5n/4 of them.
    """
    if (library := _library()) is None:
        return _differences(row, held)
    quarter = len(row) // 4
    message = torch.empty(5 * quarter, dtype=torch.uint8)
    others = message.data_ptr() + quarter
    count = library.zpp_differences(
        row.data_ptr(), held.data_ptr(), quarter, message.data_ptr(), others
    )
    return message[: quarter + count]


def add_differences(message: Tensor, row: Tensor) -> None:
    """Add what `differences` returned to `row` (n,), which holds what the sender's `held` did.

    Raises ValueError, and changes nothing, if these are not the differences of n bytes.
    """
    quarter = len(row) // 4
    count = len(message) - quarter
    if count < 0:
        raise ValueError(f"{len(message)} bytes of differences of {len(row)} bytes")
    if (library := _library()) is None:
        added = _add_differences(message, row)
    else:
        others = message.data_ptr() + quarter
        added = not library.zpp_add_differences(
            message.data_ptr(), others, count, quarter, row.data_ptr()
        )
    if not added:
        raise ValueError(f"there are {count} differences without a symbol, and not as many marks")


def spread_threes(threes: Tensor) -> Tensor:
    """uint8 (3n,) of codes of three bits -> uint8 (4n,), two codes in each."""
    fours = threes.new_empty(len(threes) // THREES * FOURS)
    if threes.is_cuda or (library := _library()) is None:
        return fours.copy_(_spread_threes(threes))
    library.zpp_spread_threes(threes.data_ptr(), len(threes) // THREES, fours.data_ptr())
    return fours


def join_threes(fours: Tensor, threes: Tensor) -> None:
    """Undo `spread_threes`: uint8 (4n,) -> `threes` (3n,)."""
    if threes.is_cuda or (library := _library()) is None:
        threes.copy_(_joined_threes(fours))
    else:
        library.zpp_join_threes(fours.data_ptr(), len(fours) // FOURS, threes.data_ptr())


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return cpu_library()
    except LibraryError:
        return None  # zeropp/quant/cpu.py has said so


def _differences(row: Tensor, held: Tensor) -> Tensor:
    changes = (row - held).view(4, -1)  # modulo 256
    symbols = torch.full_like(changes, OTHER)
    for symbol, change in enumerate((0, 1, 255)):
        symbols[changes == change] = symbol
    packed = sum(plane << shift for plane, shift in zip(symbols, SHIFTS, strict=True))
    return torch.cat((packed, changes.T[symbols.T == OTHER]))


def _add_differences(message: Tensor, row: Tensor) -> bool:
    packed, others = message.split((len(row) // 4, len(message) - len(row) // 4))
    symbols = torch.stack([packed >> shift & 3 for shift in SHIFTS])  # (4, n/4)
    is_other = symbols.T == OTHER
    if is_other.sum() != len(others):
        return False
    changes = ((symbols & 1) - (symbols >> 1)).T.contiguous()
    changes[is_other] = others
    row += changes.T.flatten()
    return True


def _spread_threes(threes: Tensor) -> Tensor:
    bits, pairs = (torch.arange(4, dtype=torch.int32, device=threes.device) * of for of in (8, 6))
    words = (threes.view(-1, THREES).int() << bits[:THREES]).sum(1, dtype=torch.int32)
    return (words[:, None] >> pairs & 63).byte().flatten()


def _joined_threes(fours: Tensor) -> Tensor:
    bits, pairs = (torch.arange(4, dtype=torch.int32, device=fours.device) * of for of in (8, 6))
    words = ((fours.view(-1, FOURS).int() & 63) << pairs).sum(1, dtype=torch.int32)
    return (words[:, None] >> bits[:THREES] & 255).byte().flatten()
