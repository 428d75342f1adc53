"""Command lines with the output of enroot and of penroot: lines/*.t. differential.py compares them."""
