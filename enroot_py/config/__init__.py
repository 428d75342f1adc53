"""Read the settings from the environment and from the files of the site and the user.

Of the other packages of penroot, imports only base.
"""
