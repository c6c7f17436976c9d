"""Settings of the property tests here."""

from hypothesis import settings

# The first call of an operator loads parts of torch, which no deadline per example survives.
settings.register_profile("layouts", deadline=None, max_examples=40)
settings.load_profile("layouts")
