"""Code that does not know of containers: errors, the log, system calls under their man-page names,
processes, and paths and trees that other users may have made.

Imports no other package of penroot.
"""
