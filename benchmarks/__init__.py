"""Figures of speed, as ratios between commands that were measured in one run."""
