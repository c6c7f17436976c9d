"""Facades for frameworks that own the model. A facade translates the data of its framework for a Dispatcher.

Each module imports its framework, so import only modules whose framework is installed. This package imports none.
"""
