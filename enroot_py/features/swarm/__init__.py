"""Pull an image once for all nodes of a step: a few nodes fetch the blobs, and the others copy them from each other.

The modules that make decisions (messages, trees, fetchers, tracker, peer) use neither sockets nor clocks.
"""
