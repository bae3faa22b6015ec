"""Environments, demonstrations of scripted experts and honest evaluation of policies."""
