"""Memory for arrays with pages before and after it that must not be touched.

Compiled code does not check bounds: one byte beyond an array, read or written, ends the process here.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_NO_ACCESS = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Room for one array at a time; it is used again and again, and its former content stays."""

    def __init__(self, most_bytes: int) -> None:
        self._size = -(-most_bytes // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, self._size + 2 * _PAGE)
        self._bytes = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        start = ctypes.addressof(self._bytes)
        for page in (start, start + _PAGE + self._size):
            if _libc.mprotect(ctypes.c_void_p(page), _PAGE, _NO_ACCESS) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def array(self, shape: int | tuple[int, ...], kind: Any, *, at_end: bool) -> NDArray[Any]:
        """An array that ends where the last page does, or begins where the first one does."""
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        if size > self._size:
            raise ValueError(f"{size} bytes do not fit into {self._size}")
        start = _PAGE + (self._size - size if at_end else 0)
        whole = np.frombuffer(self._map, dtype=np.uint8, count=size, offset=start)
        found: NDArray[Any] = whole.view(kind).reshape(shape)
        return found

    def filled(self, data: bytes, *, at_end: bool) -> NDArray[np.uint8]:
        """These bytes."""
        room: NDArray[np.uint8] = self.array(len(data), np.uint8, at_end=at_end)
        room[:] = np.frombuffer(data, dtype=np.uint8)
        return room
