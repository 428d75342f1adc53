"""Read the settings from the environment and from the files of the site and the user.

This package imports no other package of penroot except base.
"""
