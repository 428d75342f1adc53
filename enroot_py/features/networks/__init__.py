"""``penroot start --net=MODE``: no network, the host's network, pasta(1), or a proxy of the caller."""
