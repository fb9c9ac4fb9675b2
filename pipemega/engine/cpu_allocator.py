"""Set glibc's allocator to keep freed memory: the next micro-batch needs it again.

By default glibc returns the top of the heap to the kernel when it is freed, which happens after
every backward pass, and gets the same pages again in the next forward, with one page fault each.
On GPUs torch's caching allocator keeps freed memory too.
"""

import ctypes

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in this process; return False if the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Both: setting one threshold switches off the dynamic adjustment of the other.
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _NEVER))
