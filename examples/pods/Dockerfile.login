# syntax=docker/dockerfile:1
# A login pod with penroot and srun's container options: docs/howto/pods.md. Copy the files of this directory to
# dist/packages, where `make packages` has put the packages, and run this command there:
#   docker build -f Dockerfile.login -t registry.example.com/login-penroot:1 .
ARG LOGIN=ghcr.io/slinkyproject/login:25.11-ubuntu24.04

FROM scratch AS packages
COPY penroot_*.deb penroot-slurm-plugin_*.deb /

FROM ${LOGIN}
# The plugin package chooses the plugin for the Slurm in the image. No versions are pinned: they are the distribution's.
# hadolint ignore=DL3008
RUN --mount=type=bind,from=packages,target=/packages \
    apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates fuse3 squashfs-tools squashfuse /packages/*.deb \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /etc/enroot /var/lib/penroot
COPY enroot.conf /etc/enroot/enroot.conf
