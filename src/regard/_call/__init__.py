"""Checks the arguments of a call and builds its Problem.

Imports only `masks`, `scores` and `_tools`.
"""
