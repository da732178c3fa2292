"""Experiments that reproduce what the papers show, with their bars."""
