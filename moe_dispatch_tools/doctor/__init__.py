"""``doctor``: which backends work on this machine, and why the others do not."""
