"""Measurements that a reader can repeat. Each module is a command and states what it ran on."""
