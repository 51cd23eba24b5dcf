"""The long-lived services: thin loops round the core."""

from anabranch.extras import need

need("rocksdict", "mode", "prometheus_client", "numpy", "numba", extra="controller")
