"""Columns, filters and renderers of the reporting commands."""
