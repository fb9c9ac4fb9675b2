"""Files of a run: local folders and URLs, and locks that show which process uses a folder.

filesystem    a root folder: local, or a URL that fsspec opens
locks         which process holds a folder or a lock file, and whether it is alive
build_once    files that one process per file system builds, and the others wait for
"""
