"""A step on one node: the process of the plugin's helper, and its container."""
