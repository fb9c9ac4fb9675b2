"""Process groups and communication that other packages share.

topology        which rank has which index on each mesh axis
mesh            the process groups of the axes, and the device
rendezvous      a unique name for each incarnation of a restarted run
backends        the backends of a process group
torch_versions  what differs between versions of torch
comm_errors     errors that name the collective, its tensor, ranks and caller
cuda_events     events in the current stream
mixed_mesh      the mesh of a pipeline whose ranks have different devices
device_waits    waits of the host for the device, with a deadline
stream_clock    a clock of the current stream
abort           aborts the communicators of a failed process
device_collectives  collectives whose results are on the device
tied_comm       collectives among the ranks that hold a tied parameter
exit_hooks      functions that `pipemega.run` calls at the end of a script
"""
