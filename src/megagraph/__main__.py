"""``python -m megagraph VERB``: what every rule of the workflow calls."""

from megagraph.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
