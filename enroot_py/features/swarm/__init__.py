"""One pull of an image for all nodes of a step: who fetches, who gives what to whom, and how it gets there.

The decisions (messages, trees, tracker, peer) import neither sockets nor time.
"""
