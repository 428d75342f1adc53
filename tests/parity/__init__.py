"""Command lines of enroot and ours, with the output of both: lines/*.t, compared by differential.py."""
