"""One pull of an image for all nodes of a step: one node fetches a blob, and the nodes copy it from each other.

The modules that decide (messages, trees, fetchers, tracker, peer) import neither sockets nor time.
"""
