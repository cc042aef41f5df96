"""Figures, tables and the report, drawn from files. Imports no torch."""
