"""The host's network in containers: libfabric, UCX, NCCL's plugin, InfiniBand and RoCE: docs/fabric.md."""
