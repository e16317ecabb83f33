"""Verifiers: the frozen target models, behind one small interface."""
