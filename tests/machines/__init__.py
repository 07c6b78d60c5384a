"""Stateful models: random programs over a store, beside a model of plain lists and dicts."""
