"""The host's network in containers: libfabric, UCX, the NCCL plugin, InfiniBand and RoCE: docs/howto/fabric.md."""
