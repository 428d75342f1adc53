"""``penroot start --net=proxy=SOCKET``: a container whose only connection is an HTTP proxy of the caller."""
