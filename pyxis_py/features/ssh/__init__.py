"""ssh into containers of running jobs: docs/howto/ssh.md."""
