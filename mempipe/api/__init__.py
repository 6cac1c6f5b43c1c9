"""The Python interface, which `import mempipe` offers (docs/python.md)."""
