"""The daemon's side of serving: admission, the client of the serve worker, and the staging of adapters on it."""
