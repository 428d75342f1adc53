"""``penroot start --memory --cpus --pids``: a control group of version 2 for one container."""
