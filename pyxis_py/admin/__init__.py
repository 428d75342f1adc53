"""The commands of pyxis-py, such as install and check, and its manual."""
