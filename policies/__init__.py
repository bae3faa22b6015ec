"""Policies that act in chunks: one-step flow, mean-flow, drifting and consistency policies, and their baselines."""
