"""What `edged demo` runs: simulated people who rate a real model over the socket, and what came of it.

`people`, `prompts` and `outcome` are pure; `survey` speaks HTTP; `run` is the course and `report` what is left behind.
"""
