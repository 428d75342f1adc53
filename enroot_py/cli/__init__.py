"""The verbs of the command line.

This package may import all other packages. Only main.py, api, features and pyxis_py import it.
"""
