"""The verbs of the command line.

Imports all other rooms; nothing imports it but main.py and pyxis_py.
"""
