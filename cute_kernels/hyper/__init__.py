"""Hyper-connection (HC) kernels: gate, apply, norm, apply+norm."""
