"""Channels that are released between phases, and opened again on groups that were made anew.

- ``release``: what ``Dispatcher.release`` and the function for a whole model do, and the way back.
- ``groups``: how a channel finds its group again.
"""
