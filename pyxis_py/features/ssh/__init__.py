"""ssh into containers of running jobs: docs/ssh.md."""
