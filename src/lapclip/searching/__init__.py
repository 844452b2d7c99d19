"""Your own photos, indexed once and searched in words or by another image."""
