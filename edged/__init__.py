"""edged: a reinforcement-learning trainer daemon for edge boxes; `engine` holds its workers."""

__version__ = "0.1.0"
