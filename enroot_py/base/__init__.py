"""Code that does not know of containers: errors, the log, system calls under their man-page names,
processes, and paths and trees that other users may have made.

Its modules import no other package of penroot. "On the start path" in a docstring means that each start of a container
imports the module, which must therefore import little.
"""
