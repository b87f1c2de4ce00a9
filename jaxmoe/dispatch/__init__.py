"""Transports: how tokens reach the devices of their experts and come back."""
