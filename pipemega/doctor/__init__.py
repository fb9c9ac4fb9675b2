"""`pipemega doctor`: checks a cluster before the first run.

launch.py       the variables of the launcher
attendance.py   results of all ranks, through a store, with deadlines that name missing ranks
rank_facts.py   versions, device, memory and config of one rank
compare_facts.py  what these facts must have in common
connections.py  one element over every connection of the mesh
bandwidth.py    bandwidth of each axis
clocks.py       offsets between the clocks of the nodes
disk_speed.py   the checkpoint folder: shared, free space, speed
examination.py  all of them in order
findings.py     the results and their table
"""
