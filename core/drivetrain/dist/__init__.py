"""Executors: what runs plans for the loop, on one device or on several. ``executor`` needs no torch."""
