"""Command lines of enroot and ours, with what both print: lines/*.t, compared by differential.py."""
