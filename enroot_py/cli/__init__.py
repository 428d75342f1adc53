"""The verbs of the command line.

This package may import all others. Only main.py, pyxis_py and features' verbs import it.
"""
