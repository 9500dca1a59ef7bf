"""What `edged bench` measures, on a real daemon in a folder of its own: one file a part, `run` puts them together.

A composition root: it starts the daemon as a child and speaks HTTP with it like any client.
"""
