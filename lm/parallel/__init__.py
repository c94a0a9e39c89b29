"""Several devices and processes: the mesh, sharding rules, collectives, and how processes connect."""
