"""edged: a reinforcement-learning trainer daemon for edge boxes. This package is the daemon; `engine` holds its workers."""

__version__ = "0.1.0"
