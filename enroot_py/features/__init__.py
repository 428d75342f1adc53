"""Features that enroot and pyxis do not have, one folder each.

base/features.py lists the features. The core imports no feature by name.
"""
