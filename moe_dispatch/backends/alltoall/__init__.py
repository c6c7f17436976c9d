"""The backend ``alltoall``: each row goes once to each rank that owns one of its experts."""
