"""`pipemega doctor`: checks a cluster before the first run.

attendance.py       the variables of the launcher
attendance.py   results of all ranks, through a store, with deadlines that name missing ranks
rank_facts.py   versions, device, memory and config of one rank
rank_facts.py  what these facts must have in common
connections.py  one element over every connection of the mesh
measurements.py    bandwidth of each axis
measurements.py       offsets between the clocks of the nodes
measurements.py   the checkpoint folder: shared, free space, speed
examination.py  all of them in order
attendance.py     the results and their table
"""
