"""``doctor``: what can be used on this machine, and why the rest cannot."""
