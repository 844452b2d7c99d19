"""Measure this machine on real work, and choose the fastest settings that compute the same."""
