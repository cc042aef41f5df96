"""Cost models and plan search. Imports no torch."""
