"""Decide which slots each node offers: the supply stage."""
