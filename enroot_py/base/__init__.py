"""Code that is not specific to containers: errors, the log, system calls under their man-page names, processes, and
safe access to paths and directory trees of other users.

Its modules import no other package of penroot. "On the start path" in a docstring means that each start of a container
imports the module, which must therefore import little.
"""
