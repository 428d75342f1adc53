"""Pull an image once for all nodes of a step: a few nodes fetch the blobs, and the others copy them from each other.

The tracker runs in srun's helper process and plans which node downloads from which. Each node runs a peer, a process
that downloads and uploads blobs. A fetcher is a peer that gets blobs from the registry. The seed is a peer on srun's
host: it sends a file of this host, or fetches blobs that no node can fetch.

The modules that make decisions (messages, trees, fetchers, tracker, peer) use neither sockets nor clocks.
"""
