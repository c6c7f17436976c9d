"""Thin facades for frameworks that own the model: they translate, and leave every decision to the Dispatcher.

Each module imports its framework, so import the one that is installed; this package imports none.
"""
