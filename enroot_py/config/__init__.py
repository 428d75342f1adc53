"""Settings and where they come from: the environment, files of the site and of the user, penroot.yaml.

Imports base.
"""
