"""The last module that a fork server imports: the collector of garbage skips all modules.

They are 350,000 objects. Without this each full collection of each rank reads them, which also
copies their memory, and each rank frees them one by one when it ends.
"""

import gc

gc.freeze()
