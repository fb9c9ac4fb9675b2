"""What a CPU process does with memory that is freed: keep it, since the next micro-batch wants it.

By default glibc hands the top of the heap back to the system as soon as it is free, which is after
every backward pass, and gets the same pages again, one fault each, in the next forward. Here it
keeps what it has. On GPUs torch's own caching allocator does the same.
"""

import ctypes

# Of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets this process keep what it frees; False where the C library has no say in it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Both: a threshold of its own for the one switches off the other's growing with use.
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER) and mallopt(_M_MMAP_THRESHOLD, _NEVER))
