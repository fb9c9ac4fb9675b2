"""`pipemega doctor`: checks a cluster before the first run.

attendance      results of all ranks, through a store, with deadlines that name missing ranks
rank_facts      versions, device, memory and config of a rank; what they must have in common
measurements    connections, latency and bandwidth of each axis, checkpoint folder
examination     all of them in order
"""
