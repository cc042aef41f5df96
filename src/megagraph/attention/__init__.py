"""The attention slot: bias stores, hash dropout, tiled kernel. No process group."""
