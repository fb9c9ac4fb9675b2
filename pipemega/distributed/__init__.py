"""Process groups and communication that other packages share.

topology         which rank has which index on each mesh axis; a restarted run; exit hooks
mesh             the process groups of the axes, and the device; ranks with different devices
process_groups   starts torch.distributed; backends; aborts the communicators of a failed process
exchanges        collectives whose results are on the device, and of tied parameters; all-to-alls of
                 bounded size; `recorded`, which other modules use too
local_sockets    small messages on one host
device_waits     waits of the host for the device, with a deadline; events; a clock
host_memory      pinned memory, and copies to it
comm_errors      errors that name the collective, its tensor, ranks and caller
torch_versions   what differs between versions of torch
"""
