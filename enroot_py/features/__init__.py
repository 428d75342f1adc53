"""One folder for each feature beyond enroot and pyxis. base/features.py lists them; the core imports none by name."""
