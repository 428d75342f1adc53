"""Add the host's libfabric, UCX, NCCL plugin, InfiniBand and RoCE to containers: docs/howto/fabric.md."""
