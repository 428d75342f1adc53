"""Settings, read from the environment and from the files of the site and the user.

Imports base.
"""
