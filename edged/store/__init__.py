"""What the daemon must not forget - episodes, feedback, updates, adapters, API keys, the audit - in one SQLite file."""
