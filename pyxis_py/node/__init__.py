"""A step on one node: the helper process of the plugin, and the container that it holds."""
