"""Process groups and communication that other packages share.

topology        which rank has which index on each mesh axis
mesh            the process groups of the axes, and the device
rendezvous      a unique name for each incarnation of a restarted run
comm_errors     errors that name the collective, its tensor, ranks and caller
tied_comm       collectives among the ranks that hold a tied parameter
exit_hooks      functions that `pipemega.run` calls at the end of a script
"""
