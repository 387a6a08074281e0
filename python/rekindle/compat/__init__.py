"""Protocols and interfaces of other systems, served by Rekindle."""
