"""Files of a run: local folders and URLs, and locks that show which process uses a folder.

filesystem           a root folder: local, or a URL that fsspec opens
process_identity     which process holds a lock, and whether it has ended
heartbeat_lock       a lock file whose holder shows that it is alive
folder_lock          the folders that this process writes to; others are refused
"""
