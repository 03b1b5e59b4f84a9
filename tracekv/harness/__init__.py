"""A reference executor: drives any connector pair through the life cycle of the runtime, on a real transformer."""
