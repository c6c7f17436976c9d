"""``alltoall_by_node``: rows go once to each node, through a relay. ``alltoall`` works without this folder."""
