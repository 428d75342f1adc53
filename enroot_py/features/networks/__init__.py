"""``penroot start --net=MODE``: none, the host's, a private one behind pasta(1), or only a proxy of the caller."""
