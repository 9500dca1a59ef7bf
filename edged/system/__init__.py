"""The daemon as a process among others: its workers, its service manager, its lock, its log and its gauges."""
