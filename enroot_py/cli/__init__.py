"""The verbs of the command line.

This package may import all other packages. Only main.py, pyxis_py and features import it.
"""
