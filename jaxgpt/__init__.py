"""jaxgpt: raw text in, a trained GPT out. Nothing is re-exported: an import path is a file path."""

__version__ = "0.1.0"
