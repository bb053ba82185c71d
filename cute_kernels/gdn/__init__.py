"""Gated-delta-net (GDN) decode."""
