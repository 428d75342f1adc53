"""The commands of pyxis-py: install, check and the manual."""
