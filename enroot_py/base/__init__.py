"""Knows no containers: errors, the log, system calls under their man-page names, processes, and
paths and trees that others may have made.

Imports no other room.
"""
