"""Measuring on the machine at hand: honest times, its own ceilings, and where a layer's time goes."""
