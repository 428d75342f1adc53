"""One pull of an image for all nodes of a step: a few nodes fetch the blobs, the others copy them from node to node.

The modules that decide (messages, trees, fetchers, tracker, peer) import neither sockets nor time.
"""
