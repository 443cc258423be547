"""Measurements of the parts of jaxgpt, each alone: what `jaxgpt bench` prints.

Every module measures one thing and returns a flat dict of numbers and words. Wall time is taken
between results that are there, never around a dispatch.
"""
