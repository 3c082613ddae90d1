"""Tests: one folder per kind, see the headings of each file for the laws they check."""
