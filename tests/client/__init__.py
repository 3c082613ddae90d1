"""Tests with official client packages against a real service."""
