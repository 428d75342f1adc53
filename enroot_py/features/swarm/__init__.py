"""Pull an image once for all nodes of a step: a few nodes fetch its blobs, and these are copied from node to node.

The modules that make decisions (messages, trees, fetchers, tracker, peer) use neither sockets nor clocks.
"""
