"""``penroot start --memory --cpus --pids``: limit one container by a control group (cgroup v2)."""
