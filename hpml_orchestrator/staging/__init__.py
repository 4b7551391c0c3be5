"""Bring data from the shared file system to the node.

Standard library only and Python >= 3.9: it travels in `hpml-node.pyz`.
"""
