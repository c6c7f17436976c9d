"""Run one rank of a job of any size, on torch's fake process group, to learn what it allocates and sends.

``init_process_group("fake", rank=3, world_size=256)`` starts a rank without any other. A dispatcher on this group, or
on a part of it, runs as if all ranks brought the rows and the routing of this one. ``Communicator`` asks for it.

- ``communicator``: what the collectives of such a group return.
"""
