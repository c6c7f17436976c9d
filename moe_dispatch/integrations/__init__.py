"""Thin facades for frameworks that own the model: they translate, and the Dispatcher decides.

Each module imports its framework, so import only a module whose framework is installed. This package imports none.
"""
