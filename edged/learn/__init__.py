"""Learning: when to update and on what, whether a candidate may be served, and what lies between."""
