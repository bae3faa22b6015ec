"""Demonstrations of many formats as one data set of action chunks."""
