"""Decides; awaits, opens and measures nothing."""
